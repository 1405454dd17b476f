"""Shared fixtures (process pools that live as long as the test session) and Hypothesis profiles."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from rank_pool import RankPool
from rl_records import rl_record  # noqa: F401
from support_records import pytest_addoption, pytest_runtest_makereport, support_record  # noqa: F401

# CI's own, and `make nightly` with many more examples.
settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci")

# A shell that starts the tests in the background has them ignore it, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
