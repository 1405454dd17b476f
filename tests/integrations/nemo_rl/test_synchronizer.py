"""The synchronizer's order of calls, versions and errors, on groups that only write down what is asked of them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from refit_transport.errors import ConfigError, WorkerError
from refit_transport.integrations.nemo_rl import synchronizer as module
from refit_transport.integrations.nemo_rl.synchronizer import RefitTransportSynchronizer


class Group:
    """Stands for an `AdoptedGroup`."""

    def __init__(self, log: list[str], name: str, handles: Any) -> None:
        self.log, self.name, self.handles = log, name, tuple(handles)
        log.append(f"{name} adopts {','.join(self.handles)}")

    def settle(self, timeout_s: float) -> None:
        self.log.append(f"{self.name} settles")

    def start(self, method: str, *arguments: Any) -> Any:
        self.log.append(f"{self.name} {method}: {arguments[0]}")
        return SimpleNamespace(references={})

    def release(self) -> None:
        self.log.append(f"{self.name} leaves")


class Refits:
    """Stands for a `RefitSynchronizer`."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.fails = log, False

    def prepare(self) -> None:
        self.log.append("prepare")

    def reconcile(self, policy: Group, engines: list[Group]) -> None:
        self.log.append(f"reconcile {[group.handles for group in engines]}")

    def sync(self, version: int) -> Any:
        self.log.append(f"sync {version}")
        if self.fails:
            raise WorkerError("engine-0", 0, "receive", "it burns")
        summary = SimpleNamespace(network_bytes=7, old_way_received_bytes=70)
        return SimpleNamespace(version=version, total_seconds=0.5, summary=summary)


class Job:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.log: list[str] = []
        self.refits = Refits(self.log)
        self.workers = ["e0", "e0b", "e1", "e1b"]
        group = SimpleNamespace(workers=self.workers, dp_size=2, get_dp_leader_worker_idx=lambda shard: 2 * shard)
        cfg = {"vllm_cfg": {"async_engine": False}, **config}
        self.generation = SimpleNamespace(cfg=cfg, tp_size=2, pp_size=1, worker_group=group)
        self.policy = SimpleNamespace(worker_group=SimpleNamespace(workers=["p0", "p1", "p2"]))
        monkeypatch.setattr(
            RefitTransportSynchronizer,
            "_group",
            lambda _, name, handles, worker_class: Group(self.log, name, handles),
        )

        def refits(policy: Group, engines: list[Group], **named: Any) -> Refits:
            self.log.append(f"{len(policy.handles)} ranks and {len(engines)} engines of {named['ranks_per_actor']}")
            self.settings = named["settings"]
            return self.refits

        monkeypatch.setattr(module, "RefitSynchronizer", refits)
        self.made = RefitTransportSynchronizer(self.policy, self.generation)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_life_of_a_synchronizer(job: Job) -> None:
    spans: list[str] = []

    class Timer:
        @contextmanager
        def time(self, name: str) -> Any:
            spans.append(name)
            yield

    assert (job.made.is_stale, job.made.version) == (True, 0)
    job.made.init_communicator()
    assert job.made.is_stale
    figures = job.made.sync_weights(timer=Timer(), kv_scales=None)
    assert figures["refit/version"] == 1
    assert (figures["refit/seconds"], figures["refit/network_bytes"]) == (0.5, 7.0)
    assert (job.made.is_stale, job.made.version) == (False, 1)
    job.made.reconcile_communicator()
    job.made.sync_weights()
    assert spans == ["prepare_for_generation/transfer_and_update_weights"]
    assert job.made.version == 2
    job.made.shutdown()
    job.made.shutdown()
    assert job.log == [
        "policy adopts p0,p1,p2",
        "engine-0 adopts e0",
        "engine-1 adopts e1",
        "3 ranks and 2 engines of 2",
        "prepare",
        "sync 1",
        "sync 2",
        "policy leaves",
        "engine-0 leaves",
        "engine-1 leaves",
    ]
    with pytest.raises(RuntimeError, match="init_communicator"):
        job.made.sync_weights()


def test_sync_needs_init_communicator(job: Job) -> None:
    with pytest.raises(RuntimeError, match="init_communicator"):
        job.made.sync_weights()
    assert job.log == []


def test_failure_reaches_the_caller_when_all_ranks_have_ended(job: Job) -> None:
    job.made.init_communicator()
    job.made.sync_weights()
    job.log.clear()
    job.refits.fails = True
    with pytest.raises(RuntimeError, match=r"weight version 2 was not delivered: .*engine-0.*it burns"):
        job.made.sync_weights()
    assert job.log[:4] == ["sync 2", "policy settles", "engine-0 settles", "engine-1 settles"]
    assert [line.partition(":")[0] for line in job.log[4:]] == ["engine-0 fence", "engine-1 fence"]
    assert (job.made.is_stale, job.made.version) == (True, 1)
    job.refits.fails = False
    job.made.sync_weights()
    assert (job.made.is_stale, job.made.version) == (False, 2)


def test_an_engine_that_was_started_anew_is_taken_up(job: Job) -> None:
    job.made.init_communicator()
    job.made.sync_weights()
    job.log.clear()
    job.workers[2] = "e1-new"
    job.made.reconcile_communicator()
    assert job.made.is_stale
    job.made.sync_weights()
    assert job.log == ["engine-1 adopts e1-new", "reconcile [('e0',), ('e1-new',)]", "sync 2"]


def test_kv_scales_are_refused_before_anything_moves(job: Job) -> None:
    job.made.init_communicator()
    with pytest.raises(NotImplementedError, match="kv_scales"):
        job.made.sync_weights(kv_scales={"model.layers.0.self_attn.k_scale": 1.0})
    assert not any(line.startswith("sync") for line in job.log)


def test_settings_know_the_jobs_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {"domains": [[0, 1, 2], [3, 4, 5, 6]], "nic_rates": ["50GB", "25GB"]}
    refit_cfg = {"nccl_reshard": {"coverage": "all", "commit": "staged", "topology": topology}}
    job = Job(monkeypatch, refit_cfg=refit_cfg)
    job.made.init_communicator()
    assert (job.settings.coverage, job.settings.commit) == ("all", "staged")
    assert job.settings.domains == ((0, 1, 2), (3, 4, 5, 6))
    topology["domains"] = [[0, 1, 2], [3, 4, 5, 7]]
    with pytest.raises(ConfigError, match=r"topology\.domains"):
        Job(monkeypatch, refit_cfg=refit_cfg).made.init_communicator()
