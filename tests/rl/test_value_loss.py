"""The critic's loss against numbers worked out by hand, loops, and its own parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import rl_oracle
import torch

from refit_transport.rl.policy_loss import loss_counts
from refit_transport.rl.settings import ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch, split_evenly
from refit_transport.rl.value_loss import ValueMetrics, value_loss

MakeBatch = Callable[..., TrainBatch]
SETTINGS = [ValueLossSettings(), ValueLossSettings(scale=0.4, cliprange=0.2)]


def values_of(batch: TrainBatch, seed: int) -> torch.Tensor:
    noise = torch.randn(batch.size, batch.length, generator=torch.Generator().manual_seed(seed))
    return (batch.values + 0.4 * noise).requires_grad_()


@pytest.mark.parametrize(("cliprange", "loss"), [(None, 0.5 * 1.0), (0.25, 0.5 * 1.75**2)])
def test_by_hand(cliprange: float | None, loss: float) -> None:
    """Value 1, return 2, earlier value 0: clipping holds the value at 0.25, further from the return."""
    batch = TrainBatch(
        tokens=torch.zeros(1, 2, dtype=torch.int64),
        response_mask=torch.ones(1, 1),
        sample_mask=torch.ones(1),
        generation_logprobs=torch.zeros(1, 1),
        returns=torch.full((1, 1), 2.0),
        values=torch.zeros(1, 1),
    )
    found = value_loss(torch.ones(1, 1), batch, ValueLossSettings(cliprange=cliprange), loss_counts(batch))
    assert found.loss.item() == pytest.approx(loss)
    assert ValueMetrics.from_sums(found.sums).clip_fraction == (cliprange is not None)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_against_loops(settings: ValueLossSettings, seed: int, make_batch: MakeBatch) -> None:
    batch = make_batch(seed)
    values = values_of(batch, seed)
    found = value_loss(values, batch, settings, loss_counts(batch))
    assert found.loss.item() == pytest.approx(rl_oracle.value_loss(values, batch, settings), rel=1e-5)
    found.loss.backward()
    step = 1e-6
    for row, column in ((0, 3), (2, 4), (3, 3), (5, 4)):
        ends = []
        for sign in (1, -1):
            near = values.detach().double().clone()
            near[row, column] += sign * step
            ends.append(rl_oracle.value_loss(near, batch, settings))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert values.grad[row, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_add_up(settings: ValueLossSettings, parts: int, make_batch: MakeBatch) -> None:
    batch = make_batch(7)
    values, counts = values_of(batch, 7), loss_counts(batch)
    whole = value_loss(values, batch, settings, counts)
    shares = [
        value_loss(rows, part, settings, counts)
        for rows, part in zip(values.chunk(parts), split_evenly(batch, parts), strict=True)
    ]
    torch.testing.assert_close(sum(share.sums for share in shares), whole.sums)
    (gradient,) = torch.autograd.grad(whole.loss, values)
    (added,) = torch.autograd.grad(sum(share.loss for share in shares), values)
    torch.testing.assert_close(added, gradient)


def test_what_is_masked_never_counts(make_batch: MakeBatch) -> None:
    batch = make_batch(7)
    values, counts, outside = values_of(batch, 7), loss_counts(batch), batch.token_mask == 0
    dirty = replace(
        batch,
        returns=batch.returns.masked_fill(outside, torch.nan),
        values=batch.values.masked_fill(outside, torch.nan),
    )
    spoilt = values.detach().masked_fill(outside, torch.nan).requires_grad_()
    for settings in SETTINGS:
        found = value_loss(spoilt, dirty, settings, counts)
        assert found.loss.item() == value_loss(values, batch, settings, counts).loss.item()
        (gradient,) = torch.autograd.grad(found.loss, spoilt)
        assert not gradient[outside].any()
        assert gradient.isfinite().all()


def test_metrics_are_those_of_the_tokens(make_batch: MakeBatch) -> None:
    batch = make_batch(9)
    values = values_of(batch, 9).detach()
    counted = batch.token_mask.bool()
    metrics = ValueMetrics.from_sums(value_loss(values, batch, SETTINGS[0], loss_counts(batch)).sums)
    returns, residual = batch.returns[counted].double(), (batch.returns - values)[counted].double()
    assert metrics.value == pytest.approx(values[counted].mean().item(), rel=1e-5)
    explained = 1 - residual.var(correction=0) / returns.var(correction=0)
    assert metrics.explained_variance == pytest.approx(explained.item(), rel=1e-5)


@pytest.mark.parametrize(("column", "settings"), [("returns", SETTINGS[0]), ("values", SETTINGS[1])])
def test_a_missing_column_is_told(column: str, settings: ValueLossSettings, make_batch: MakeBatch) -> None:
    batch = make_batch(1)
    with pytest.raises(ValueError, match=f"needs {column} in the batch"):
        value_loss(values_of(batch, 1), replace(batch, **{column: None}), settings, loss_counts(batch))
