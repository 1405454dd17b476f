"""Refits between two Megatron models, each on its own ranks: what each rank runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from channels import open_channel
from megatron_export import export, largest_padding
from megatron_ranks import start

from refit_transport.config.settings import RefitSettings
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.session import RefitSession
from refit_transport.targets.module import DescribedTarget


@dataclass
class Refits:
    """One rank's export, and its largest element of vocabulary padding, after each refit.

    `differing` is how many boxes a comparison finds after each refit, and at last when a zero-centred norm was changed.
    """

    exported: list[dict[str, np.ndarray]] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


def export_after_refits(
    *,
    rank: int,
    world_size: int,
    port: int,
    checkpoints: list[Path],
    parallelism: list[MegatronParallelism],
    ports: list[int],
    vocab: int,
    zero_centered: bool = False,
) -> Refits:
    """The first half of the ranks trains, the other generates; refits with the loaded, other and loaded weights.

    Those that generate store their norms less 1 if they are to be zero-centred.
    """
    half = world_size // 2
    side = rank // half
    # Each side pads the vocabulary in its own way.
    worker = start(
        rank % half,
        half,
        ports[side],
        checkpoints[side],
        parallelism[side],
        make_vocab_size_divisible_by=(8, 64)[side],
    )
    try:
        if side == 1 and zero_centered:
            for chunk in worker._chunks:
                chunk.config.layernorm_zero_centered_gamma = True
        channel = open_channel(rank, world_size=world_size, port=port)
        settings = RefitSettings(coverage="all", verify="full", timeout_s=60.0) if rank == 0 else None
        source = worker.source() if side == 0 else None
        target = DescribedTarget(worker.source()) if side == 1 else None
        session = RefitSession.prepare(channel, settings=settings, source=source, target=target)
        found = Refits()
        for version, seed in enumerate((None, 4, None)):
            if side == 0:
                worker.set_weights(seed)
            session.run(version)
            found.exported.append(export(worker._chunks, vocab=vocab))
            found.padding.append(largest_padding(worker._chunks, vocab=vocab))
            found.differing.append(session.compare().differing)
        if side == 1 and zero_centered:
            norm = next(p for chunk in worker._chunks for n, p in chunk.named_parameters() if "norm" in n)
            with torch.no_grad():
                norm[-1] += 1
        found.differing.append(session.compare().differing)
        session.close()
        return found
    finally:
        worker.shutdown()
