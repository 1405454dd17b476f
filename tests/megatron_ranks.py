"""What each rank of the Megatron tests runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from megatron_export import export, largest_padding

from refit_transport.errors import AgreementError
from refit_transport.layout.manifest import RankManifest
from refit_transport.layout.parallelism import MegatronParallelism


@dataclass
class Snapshot:
    """One rank at one time: its manifest, the elements of each piece, and its share of the oracle's export."""

    manifest: RankManifest
    pieces: list[np.ndarray]
    exported: dict[str, np.ndarray]
    padding: float


@dataclass
class Outcome:
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    logprobs: dict[str, list[list[float]]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def held(source: Any, rank: int) -> tuple[RankManifest, list[np.ndarray]]:
    """What a rank says that it holds, and the elements of each piece."""
    from refit_transport.views import piece_view

    manifest, buffers = source.manifest(rank), source.buffers()
    return manifest, [piece_view(piece, buffers).clone().float().numpy() for piece in manifest.pieces]


def _snapshot(worker: Any) -> Snapshot:
    manifest, pieces = held(worker.source(), worker.rank)
    exported = export(worker._chunks, vocab=worker._model.vocab)
    return Snapshot(manifest, pieces, exported, largest_padding(worker._chunks, vocab=worker._model.vocab))


def start(
    rank: int, world_size: int, port: int, checkpoint: Path, parallelism: MegatronParallelism, **options: Any
) -> Any:
    from refit_transport.cluster.training import TrainingWorker

    return TrainingWorker(
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        checkpoint=str(checkpoint),
        parallelism=parallelism,
        **{"timeout_s": 60.0, **options},
    )


def narrow_weights(*, rank: int, world_size: int, port: int, checkpoint: Path, batch: list[list[int]]) -> Outcome:
    """Loads in bfloat16 and trains ten steps on one batch."""
    worker = start(rank, world_size, port, checkpoint, MegatronParallelism(2), precision="bfloat16", learning_rate=1e-4)
    try:
        outcome = Outcome({"loaded": _snapshot(worker)})
        outcome.losses = [worker.train_step(batch) for _ in range(10)]
        worker.check_replicas()
        outcome.snapshots["trained"] = _snapshot(worker)
        worker.perturb(1)
        outcome.snapshots["perturbed"] = _snapshot(worker)
        worker.train_step(batch)
        outcome.snapshots["trained again"] = _snapshot(worker)
        for stage, seed in (("A", None), ("B", 4), ("A again", None), ("B again", 4)):
            worker.set_weights(seed)
            outcome.snapshots[stage] = _snapshot(worker)
        return outcome
    finally:
        worker.shutdown()


def tamper(*, rank: int, world_size: int, port: int, checkpoint: Path, parallelism: MegatronParallelism) -> str:
    """Changes one element of the last rank's copy of a replicated tensor; what `check_replicas` says."""
    worker = start(rank, world_size, port, checkpoint, parallelism)
    try:
        worker.check_replicas()
        if rank == world_size - 1:
            next(p for n, p in worker.source().buffers().items() if "output_layer" in n)[3, 5] += 1
        worker.check_replicas()
    except AgreementError as error:
        return str(error)
    finally:
        worker.shutdown()
    return ""


def hang(*, rank: int, world_size: int, port: int, checkpoint: Path, patience_s: float) -> tuple[str, float]:
    """Rank 1 doesn't come to a step; how and when rank 0 notices."""
    worker = start(rank, world_size, port, checkpoint, MegatronParallelism(2), timeout_s=patience_s)
    begin = time.monotonic()
    try:
        if rank == 1:
            time.sleep(patience_s + 4)
        else:
            worker.train_step([[1, 2, 3]])
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    finally:
        worker.shutdown()
    return "", time.monotonic() - begin


def uneven_deal(*, rank: int, world_size: int, port: int, checkpoint: Path) -> str:
    worker = start(rank, world_size, port, checkpoint, MegatronParallelism())
    try:
        worker.train_step([[1, 2, 3]] * 3)
    except ValueError as error:
        return str(error)
    finally:
        worker.shutdown()
    return ""


def full_life(
    *,
    rank: int,
    world_size: int,
    port: int,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    batches: list[list[list[int]]],
    prompts: list[list[int]],
    options: dict[str, Any],
) -> Outcome:
    """Load, score, train, score, perturb, score; a snapshot after each change."""
    worker = start(rank, world_size, port, checkpoint, parallelism, **options)
    try:
        outcome = Outcome()
        for stage in ("loaded", "trained", "perturbed"):
            if stage == "trained":
                outcome.losses = [worker.train_step(batch) for batch in batches]
            elif stage == "perturbed":
                worker.perturb(seed=7)
            worker.check_replicas()
            outcome.snapshots[stage] = _snapshot(worker)
            outcome.logprobs[stage] = worker.logprobs(prompts)
        return outcome
    finally:
        worker.shutdown()


def loaded_and_changed(
    *,
    rank: int,
    world_size: int,
    port: int,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    prompts: list[list[int]],
    options: dict[str, Any],
) -> Outcome:
    """Loads and scores, then changes every weight and scores again. No export: the oracle is Hugging Face's model."""
    worker = start(rank, world_size, port, checkpoint, parallelism, **options)
    try:
        outcome = Outcome()
        for stage in ("loaded", "perturbed"):
            if stage == "perturbed":
                worker.perturb(seed=7)
            worker.check_replicas()
            manifest, pieces = held(worker.source(), rank)
            outcome.snapshots[stage] = Snapshot(manifest, pieces, {}, 0.0)
            outcome.logprobs[stage] = worker.logprobs(prompts)
        return outcome
    finally:
        worker.shutdown()


def loaded_and_trained(
    *,
    rank: int,
    world_size: int,
    port: int,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    batches: list[list[list[int]]],
    prompts: list[list[int]],
    options: dict[str, Any],
) -> Outcome:
    """Loads and trains; no export: the oracle is Hugging Face's model, trained alike."""
    worker = start(rank, world_size, port, checkpoint, parallelism, **options)
    try:
        outcome = Outcome()
        outcome.losses = [worker.train_step(batch) for batch in batches]
        worker.check_replicas()
        manifest, pieces = held(worker.source(), rank)
        outcome.snapshots["trained"] = Snapshot(manifest, pieces, {}, 0.0)
        outcome.logprobs["trained"] = worker.logprobs(prompts)
        return outcome
    finally:
        worker.shutdown()
