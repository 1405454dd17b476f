"""Actors that stay warm between the end-to-end tests: two training ranks, two engine ranks, one more engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from refit_jobs import ENVIRONMENT, TIMEOUT_S

from refit_transport.cluster.job import ray_cluster
from refit_transport.cluster.workers import WorkerGroup


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[str, WorkerGroup]]:
    with ray_cluster(address=None, cpus=8):
        made: dict[str, WorkerGroup] = {}
        try:
            for name, count in (("policy", 2), ("engine-tp2", 2), ("engine-a", 1), ("engine-b", 1)):
                made[name] = WorkerGroup(
                    name, count, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S
                )
            yield made
        finally:
            for group in made.values():
                group.release()
