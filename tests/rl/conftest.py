"""Random batches for the losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refit_transport.rl.trajectories import TrainBatch

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture
def make_batch() -> MakeBatch:
    """Rows with prompts and responses of random lengths, the last row masked out; every column is set."""

    def make(seed: int, *, rows: int = 6, length: int = 9) -> TrainBatch:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(rows, length, generator=generator)

        starts = torch.randint(0, length // 2, (rows, 1), generator=generator)
        ends = starts + torch.randint(1, length - length // 2 + 1, (rows, 1), generator=generator)
        position = torch.arange(length)
        generation = -normal(1.0).abs()
        return TrainBatch(
            tokens=torch.randint(0, 16, (rows, length + 1), generator=generator),
            response_mask=((position >= starts) & (position < ends)).float(),
            sample_mask=(torch.arange(rows) < rows - 1).float(),
            generation_logprobs=generation,
            prev_logprobs=generation + normal(0.4),
            reference_logprobs=generation + normal(0.8),
            advantages=normal(1.0),
            returns=normal(1.0),
            values=normal(1.0),
        )

    return make


@pytest.fixture
def moved() -> Callable[[TrainBatch, int], torch.Tensor]:
    """The policy's log-probabilities some way from the batch's previous ones, with gradient."""

    def move(batch: TrainBatch, seed: int) -> torch.Tensor:
        noise = torch.randn(batch.size, batch.length, generator=torch.Generator().manual_seed(seed + 1000))
        return (batch.prev_logprobs + 0.4 * noise).requires_grad_()

    return move
