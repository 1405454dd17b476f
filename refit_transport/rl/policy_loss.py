"""The clipped policy gradient loss: a sum that adds up over micro-batches and data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from refit_transport.rl.kl import kl_penalty
from refit_transport.rl.settings import ImportanceSettings, LossCounts, PolicyLossSettings
from refit_transport.rl.trajectories import TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Means over an update. Of tokens: all but `loss` and `kl_penalty`, which are means as the loss takes them.

    `ratio` is pi / pi_prev; `clip_fraction` the tokens where the clipped ratio decides; `approx_entropy` (nats) the
    estimate of the policy's entropy, `approx_kl` of its divergence from pi_prev (k3); `importance_weight` as applied,
    `truncated_fraction` the tokens whose weight a bound changed; `logprob_error` |log pi_prev - log pi_generation|.
    """

    loss: float
    kl_penalty: float
    ratio: float
    clip_fraction: float
    approx_entropy: float
    approx_kl: float
    importance_weight: float
    truncated_fraction: float
    logprob_error: float

    @classmethod
    def from_sums(cls, sums: torch.Tensor) -> PolicyMetrics:
        """Of the `sums` of all micro-batches and ranks, added up."""
        return cls(*sums.tolist())


class PolicyLoss(NamedTuple):
    """`loss` is a scalar with gradient; `sums` `[9]` float64 are this part's shares of `PolicyMetrics`, in order."""

    loss: torch.Tensor
    sums: torch.Tensor


def loss_counts(batch: TrainBatch) -> LossCounts:
    """The counts of a whole batch, for one update over all of it."""
    return LossCounts(tokens=batch.token_count, samples=batch.sample_count)


def policy_loss(
    logprobs: torch.Tensor, batch: TrainBatch, settings: PolicyLossSettings, counts: LossCounts
) -> PolicyLoss:
    """The share of `batch`, a micro-batch of any size, in the loss of the update that `counts` describe.

    `logprobs` `[batch, length]` are the policy's for the batch's predicted tokens, with gradient. The sum of `loss`
    over all micro-batches and data-parallel ranks is the loss of the update, and so with gradients and `sums`.

    Raises:
        ValueError: the batch lacks advantages, or log-probabilities that the settings need.
    """
    mask = batch.token_mask.bool()
    # What isn't counted may be anything, also no number: 0 * nan would spoil sum and gradient.
    logprobs = logprobs.float().masked_fill(~mask, 0.0)
    current = logprobs.detach()
    generation = batch.generation_logprobs.masked_fill(~mask, 0.0)
    advantages = _column(batch, "advantages", mask)
    previous = current if settings.force_on_policy_ratio else _column(batch, "prev_logprobs", mask)

    gain = _clipped_gain(logprobs - previous, advantages, mask, settings)
    raw = _importance(previous - generation, mask, settings)
    weight = torch.ones_like(raw)
    if settings.importance is not None:
        weight = _truncate(raw, previous - generation, mask, settings.importance)
    penalty = torch.zeros_like(logprobs)
    if settings.kl is not None and settings.kl.penalty:
        penalty = kl_penalty(logprobs, _column(batch, "reference_logprobs", mask), settings.kl)

    share = _shares(mask, settings, counts)
    loss = ((penalty - weight * gain.value) * share).sum()
    with torch.no_grad():
        moved, error = current - previous, (previous - generation).abs()
        truncated = weight != raw if settings.importance is not None else torch.zeros_like(mask)
        entropy = -torch.exp(current - generation) * current
        kl = torch.expm1(-moved) + moved
        means = (gain.ratio, gain.is_clipped, entropy, kl, weight, truncated, error)
        per_token = mask.double() / counts.tokens
        sums = torch.stack(
            [loss.double(), (penalty * share).sum().double(), *((each * per_token).sum() for each in means)]
        )
    return PolicyLoss(loss, sums)


class _Gain(NamedTuple):
    """All `[batch, length]`: what is maximised, the ratio, and where the clipped one decides."""

    value: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor


def _clipped_gain(
    log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, settings: PolicyLossSettings
) -> _Gain:
    if settings.sequence_level_importance_ratios:
        log_ratio = _sequence_mean(log_ratio, mask).expand_as(log_ratio)
    ratio = log_ratio.exp()
    unclipped = advantages * ratio
    clipped = advantages * ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    value = torch.minimum(unclipped, clipped)
    if settings.ratio_clip_c is not None:
        value = torch.where(advantages < 0, torch.maximum(value, advantages * settings.ratio_clip_c), value)
    return _Gain(value, ratio, clipped < unclipped)


def _column(batch: TrainBatch, name: str, mask: torch.Tensor) -> torch.Tensor:
    column: torch.Tensor | None = getattr(batch, name)
    if column is None:
        raise ValueError(f"the policy loss with these settings needs {name} in the batch (got None)")
    return column.masked_fill(~mask, 0.0)


def _sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, 1]`: the mean of each row over its tokens that count; 0 for a row without any."""
    return (values * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _shares(mask: torch.Tensor, settings: PolicyLossSettings, counts: LossCounts) -> torch.Tensor:
    """`[batch, length]`: the weight of each token in the update's mean."""
    if settings.token_level_loss:
        return mask / counts.tokens
    return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) / counts.samples


def _importance(log_weight: torch.Tensor, mask: torch.Tensor, settings: PolicyLossSettings) -> torch.Tensor:
    """pi_prev / pi_generation per token, or of the whole sequence; what isn't finite counts 0."""
    if settings.sequence_level_importance_ratios:
        log_weight = (log_weight * mask).sum(dim=1, keepdim=True).expand_as(log_weight)
    return torch.nan_to_num(log_weight.exp(), nan=0.0, posinf=0.0, neginf=0.0)


def _truncate(
    raw: torch.Tensor, log_weight: torch.Tensor, mask: torch.Tensor, settings: ImportanceSettings
) -> torch.Tensor:
    if settings.truncation is None:
        return raw
    low, high = settings.bounds
    if settings.truncation == "tis":
        return raw.clamp(low, high)
    judged = raw if settings.truncation == "icepop" else _sequence_mean(log_weight, mask).exp().expand_as(raw)
    return torch.where((judged >= low) & (judged <= high), raw, 0.0)
