"""The critic's loss: a sum that adds up over micro-batches and data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from refit_transport.rl.settings import LossCounts, ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch


@dataclass(frozen=True, slots=True)
class ValueMetrics:
    """Means over the tokens of an update; `explained_variance` is 1 - Var(returns - values) / Var(returns)."""

    loss: float
    clip_fraction: float
    value: float
    returns: float
    explained_variance: float

    @classmethod
    def from_sums(cls, sums: torch.Tensor) -> ValueMetrics:
        """Of the `sums` of all micro-batches and ranks, added up. Where returns don't vary, nothing is explained: 0."""
        loss, clipped, value, returns, square, residual_square = sums.tolist()
        variance = square - returns**2
        residual = residual_square - (returns - value) ** 2
        return cls(loss, clipped, value, returns, 1 - residual / variance if variance > 1e-12 else 0.0)


class ValueLoss(NamedTuple):
    """`loss` is a scalar with gradient; `sums` `[6]` float64 are what `ValueMetrics.from_sums` takes."""

    loss: torch.Tensor
    sums: torch.Tensor


def value_loss(values: torch.Tensor, batch: TrainBatch, settings: ValueLossSettings, counts: LossCounts) -> ValueLoss:
    """The share of `batch`, a micro-batch of any size, in the critic's loss of the update that `counts` describe.

    `values` `[batch, length]` are the critic's, with gradient: column t is the value of the state before token t + 1.
    Losses, gradients and `sums` of all micro-batches and data-parallel ranks add up to the update's.

    Raises:
        ValueError: the batch lacks returns, or the earlier values that clipping needs.
    """
    mask = batch.token_mask.bool()
    values = values.float().masked_fill(~mask, 0.0)
    returns = _column(batch, "returns", mask)
    error = (values - returns).square()
    worst = error
    if settings.cliprange is not None:
        before = _column(batch, "values", mask)
        near = values.clamp(before - settings.cliprange, before + settings.cliprange)
        worst = torch.maximum(error, (near - returns).square())
    loss = settings.scale / 2 * (worst * mask).sum() / counts.tokens
    with torch.no_grad():
        exact = returns.double()
        columns = (settings.scale / 2 * worst, worst > error, values, exact, exact.square(), (exact - values).square())
        sums = torch.stack([(column.double() * mask).sum() for column in columns]) / counts.tokens
    return ValueLoss(loss, sums)


def _column(batch: TrainBatch, name: str, mask: torch.Tensor) -> torch.Tensor:
    column: torch.Tensor | None = getattr(batch, name)
    if column is None:
        raise ValueError(f"the value loss with these settings needs {name} in the batch (got None)")
    return column.masked_fill(~mask, 0.0)
