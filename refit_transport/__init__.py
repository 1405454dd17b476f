"""Shard-to-shard weight refit from training ranks to generation ranks."""

__version__ = "0.1.0"
