"""Hypothesis profiles: CI's own, and `make nightly` with many more examples."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci")
