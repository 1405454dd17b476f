"""Refits from real Megatron ranks into real vLLM ranks, in processes of their own: what each rank runs.

The Megatron ranks are the first ranks of the refit. Each side reads checkpoints A and B by itself: Megatron ranks
through the naming table, vLLM ranks by vLLM's own loader, whose models are what refitted ones are compared with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from channels import open_channel
from megatron_ranks import start

from refit_transport.config.settings import RefitSettings
from refit_transport.layout.manifest import RankManifest
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.vllm import EngineParallelism
from refit_transport.session import RefitSession

# The weights of each refit; a vLLM rank starts with A.
ORDER = ("b", "a", "b")
# The other side may have to import vLLM first.
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of both sides meet, and how many each side has."""

    port: int
    sources: int
    targets: int

    def prepare(self, rank: int, **sides: Any) -> RefitSession:
        ranks = tuple(range(self.sources + self.targets))
        channel = open_channel(rank, world_size=len(ranks), port=self.port, timeout_s=TIMEOUT_S)
        if rank:
            return RefitSession.prepare(channel, **sides)
        # Each side is a domain, so that what crosses between them goes over gloo.
        domains = (ranks[: self.sources], ranks[self.sources :])
        settings = RefitSettings(
            coverage="all", verify="full", fabric="gloo", domains=domains, bucket_bytes=1 << 16, timeout_s=TIMEOUT_S
        )
        return RefitSession.prepare(channel, settings=settings, **sides)


@dataclass
class Sent:
    """What a Megatron rank knows afterwards; `shard_to_shard` and the routes are rank 0's."""

    manifest: RankManifest
    logprobs: list[list[float]]
    unused: tuple[str, ...]
    whole: list[str]
    shard_to_shard: float
    unequal: int


@dataclass
class Served:
    """What a vLLM rank found. Names of tensors that differ, after each refit, from a fresh load of the same weights."""

    manifest: RankManifest
    different_before: int
    differing: list[list[str]] = field(default_factory=list)
    private: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    tails: dict[str, list[int]] = field(default_factory=dict)


def train(
    *,
    rank: int,
    world_size: int,
    port: int,
    meeting: Meeting,
    folders: dict[str, Path],
    cut: MegatronParallelism,
    options: dict[str, Any],
    prompts: list[list[int]],
) -> Sent:
    from refit_transport.cluster.megatron_model import load_checkpoint

    worker = start(rank, world_size, port, folders["a"], cut, **options)
    try:
        session = meeting.prepare(rank, source=worker.source())
        for version, name in enumerate(ORDER):
            load_checkpoint(worker._chunks, worker.source(), folders[name], rank=rank)
            session.run(version)
        summary = session.plan.summary()
        sent = Sent(
            worker.source().manifest(rank),
            worker.logprobs(prompts) if prompts else [],
            tuple(name for names in summary.skipped.values() for name in names),
            [route.tensor for route in session.plan.routes if route.transport != "nccl_reshard"],
            summary.shard_to_shard,
            len(session.compare().first),
        )
        session.close()
        return sent
    finally:
        worker.shutdown()


def serve(
    *, rank: int, world_size: int, port: int, meeting: Meeting, folders: dict[str, Path], cut: EngineParallelism
) -> Served:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_DIST_IDENT": f"pair-{port}"}
    from vllm_models import Model, differing, kept, leave_ranks, prepare_process, tails

    from refit_transport.config.checkpoint_config import read_config
    from refit_transport.targets.vllm import VllmTarget

    prepare_process()
    try:
        fresh = Model(folders["b"], cut)
        wanted = {"b": fresh.tensors()}
        del fresh
        model = Model(folders["a"], cut)
        wanted["a"] = model.tensors()
        addresses = {name: tensor.data_ptr() for name, tensor in kept(model.module)}
        target = VllmTarget(model.module, model.config)
        session = meeting.prepare(meeting.sources + rank, target=target)
        served = Served(session.plan.job.target.ranks[rank], len(differing(wanted["a"], wanted["b"])))
        for version, name in enumerate(ORDER):
            session.run(version)
            served.differing.append(differing(model.tensors(), wanted[name]))
        session.compare()
        session.close()
        served.private = dict(target.private_layers())
        served.moved = [name for name, tensor in kept(model.module) if tensor.data_ptr() != addresses[name]]
        served.tails = tails(model.module, read_config(folders["a"])["vocab_size"])
        return served
    finally:
        leave_ranks()
