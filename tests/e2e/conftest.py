"""Actors that stay warm between the end-to-end tests: two training ranks, two engine ranks, two more engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_groups import WarmGroups

from refit_transport.cluster.job import ray_cluster


@pytest.fixture(scope="session")
def groups() -> Iterator[WarmGroups]:
    with ray_cluster(address=None, cpus=8):
        made = WarmGroups({"policy": 2, "engine-tp2": 2, "engine-a": 1, "engine-b": 1})
        try:
            yield made
        finally:
            made.release()
