"""Strategies for a set of parameters, by name."""
