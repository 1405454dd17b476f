"""Entry points into other frameworks."""
