"""Adapters of the training side."""
