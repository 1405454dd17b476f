"""What each rank of the Megatron tests runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from megatron_export import export

from refit_transport.cluster.parallelism import MegatronParallelism
from refit_transport.layout.manifest import RankManifest


@dataclass
class Snapshot:
    """One rank at one time: its manifest, the elements of each piece, and its share of the oracle's export."""

    manifest: RankManifest
    pieces: list[np.ndarray]
    exported: dict[str, np.ndarray]


@dataclass
class Outcome:
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    logprobs: dict[str, list[list[float]]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def _snapshot(worker: Any) -> Snapshot:
    from refit_transport.sources.megatron import piece_view

    source = worker.source()
    manifest, buffers = source.manifest(worker.rank), source.buffers()
    pieces = [piece_view(piece, buffers).clone().float().numpy() for piece in manifest.pieces]
    exported = export(worker._chunks, vocab=worker._model.vocab)
    return Snapshot(manifest, pieces, exported)


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
    from refit_transport.cluster.training import TrainingWorker

    worker = TrainingWorker(
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        checkpoint=str(checkpoint),
        parallelism=parallelism,
        timeout_s=60,
        **options,
    )
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
