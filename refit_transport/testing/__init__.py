"""Shipped test support: oracles, strategies and contract suites. Imported by nothing else in the package."""
