"""Actors that somebody else started as a group of ours: blocking ones, and ones with an event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import refit_transport
from refit_transport.cluster.job import ray_cluster
from refit_transport.cluster.workers import collect
from refit_transport.errors import TransferError, WorkerError
from refit_transport.integrations.nemo_rl import groups
from refit_transport.integrations.nemo_rl.groups import AdoptedGroup, workers_in
from refit_transport.integrations.nemo_rl.remote import Relay

pytestmark = pytest.mark.e2e


class Blocking:
    """Knows nothing of refits."""

    value = 3


class Looping:
    value = 4

    async def listen(self) -> None:
        self.loop = asyncio.get_running_loop()


class Worker:
    """What a group gives an actor."""

    def __init__(self, actor: Any, *, rank: int, node: str, label: str) -> None:
        self.actor, self.rank, self.node, self.label = actor, rank, node, label

    def tell(self, *, plus: int) -> tuple[int, str, int]:
        return self.rank, self.label, self.actor.value + plus

    def fail(self, rank: int) -> None:
        if rank == self.rank:
            raise TransferError(rank, -1, "receive", "", "a refusal")
        time.sleep(0.5)

    def leave_refit(self) -> None:
        self.actor.left = True


class AsyncWorker(Worker):
    def loop(self) -> asyncio.AbstractEventLoop:
        found: asyncio.AbstractEventLoop = self.actor.loop
        return found

    async def tell(self, *, plus: int) -> tuple[int, str, int]:  # type: ignore[override]
        await asyncio.sleep(0.2)
        return super().tell(plus=plus)

    async def fail(self, rank: int) -> None:  # type: ignore[override]
        await asyncio.sleep(0.1)
        super().fail(rank)

    async def leave_refit(self) -> None:  # type: ignore[override]
        super().leave_refit()


def _left(actor: Any) -> bool:
    return bool(getattr(actor, "left", False))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(address=None, cpus=2):
        yield


@pytest.fixture(params=["blocking", "looping"])
def group(cluster: None, request: pytest.FixtureRequest) -> Iterator[tuple[AdoptedGroup, list[Any]]]:
    is_looping = request.param == "looping"
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}}
    handles = [ray.remote(Looping if is_looping else Blocking).options(**options).remote() for _ in range(2)]
    if is_looping:
        ray.get([handle.listen.remote() for handle in handles])
    relay = ray.remote(Relay).options(num_cpus=0).remote() if is_looping else None
    made = AdoptedGroup("engine", handles, timeout_s=60, relay=relay)
    collect([workers_in(made, AsyncWorker if is_looping else Worker, {"label": request.param})], timeout_s=60)
    yield made, handles
    for handle in [*handles, *([relay] if relay is not None else [])]:
        ray.kill(handle)


def test_calls_errors_and_the_end(group: tuple[AdoptedGroup, list[Any]], request: pytest.FixtureRequest) -> None:
    made, handles = group
    label = request.node.callspec.params["group"]
    value = {"looping": 4, "blocking": 3}[label]
    assert made.call("tell", plus=10) == [(0, label, value + 10), (1, label, value + 10)]
    assert len(set(made.nodes())) == 1
    assert len(set(made.process_ids())) == 2

    with pytest.raises(WorkerError, match="a refusal") as error:
        made.call("fail", 1)
    assert (error.value.actor, error.value.rank) == ("engine", 1)
    made.start("tell", plus=0)
    made.settle(30)
    assert made._started == []

    assert ray.get([handle.__ray_call__.remote(_left) for handle in handles]) == [False, False]
    made.release()
    assert ray.get([handle.__ray_call__.remote(_left) for handle in handles]) == [True, True]


def test_an_actor_with_another_version_is_refused(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ray.remote(Blocking).options(num_cpus=0).remote()
    found = refit_transport.__version__
    monkeypatch.setattr(groups.refit_transport, "__version__", "9.9")
    with pytest.raises(
        WorkerError, match=f"has refit_transport {found} at .*, the driver has 9.9; start the driver with"
    ):
        AdoptedGroup("policy", [handle], timeout_s=60)
    ray.kill(handle)
