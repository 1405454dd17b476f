"""Adapters of the generation side."""
