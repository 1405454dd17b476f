"""How much better each token did than expected: group-relative advantages (GRPO), and GAE with a critic (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from refit_transport.rl.kl import kl_estimate
from refit_transport.rl.settings import KlSettings
from refit_transport.rl.trajectories import TrainBatch

STD_EPSILON = 1e-4
_WHITENING_EPSILON = 1e-8
# A variance below this share of the whole is what is left of 0 after rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`use_leave_one_out_baseline`: what a sample is compared with leaves out the sample itself.

    `normalize_rewards` divides by the standard deviation (of the same rewards as the baseline) plus `STD_EPSILON`.
    """

    use_leave_one_out_baseline: bool = True
    normalize_rewards: bool = True


@dataclass(frozen=True, slots=True)
class GaeSettings:
    """`gae_gamma` discounts rewards, `gae_lambda` trades the critic's bias (0) against variance (1).

    `normalize_advantages` whitens them over all tokens of the batch. `kl` (None: not at all) is subtracted from every
    token's reward.
    """

    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    normalize_advantages: bool = True
    kl: KlSettings | None = None

    def __post_init__(self) -> None:
        for name in ("gae_gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1 (got {getattr(self, name)})")


class Gae(NamedTuple):
    """Both `[batch, length]` fp32, 0 outside of the mask. `returns` are what the critic is trained on."""

    advantages: torch.Tensor
    returns: torch.Tensor


def group_advantages(rewards: Sequence[float], groups: torch.Tensor, settings: GroupSettings) -> torch.Tensor:
    """`[samples]` fp32: each sample's reward less its group's mean, perhaps divided by its group's deviation.

    `groups` `[samples]` numbers the prompt of each sample, in any order. The deviation is the unbiased one. Where it is
    0 or unknown nothing is divided; a sample alone in its group has advantage 0.

    >>> plain = GroupSettings(use_leave_one_out_baseline=False, normalize_rewards=False)
    >>> group_advantages([1.0, 0.0, 5.0], torch.tensor([7, 7, 9]), plain).tolist()
    [0.5, -0.5, 0.0]
    >>> leave_one_out = GroupSettings(normalize_rewards=False)
    >>> group_advantages([1.0, 0.0, 5.0], torch.tensor([7, 7, 9]), leave_one_out).tolist()
    [1.0, -1.0, 0.0]
    """
    exact = torch.tensor(rewards, dtype=torch.float64)
    _, index = torch.unique(groups, return_inverse=True)
    count = torch.bincount(index)[index].double()
    own = int(settings.use_leave_one_out_baseline)
    compared = count - own
    # Relative to the group's mean, so that the squares of large, close rewards keep their digits.
    centred = exact - _group_sum(exact, index) / count
    baseline = -own * centred / compared.clamp(min=1)
    advantages = torch.where(compared > 0, centred - baseline, 0.0)
    if settings.normalize_rewards:
        spread = _group_sum(centred.square(), index)
        squares = spread - own * centred.square() - compared * baseline.square()
        known = (compared > 1) & (squares > _ROUNDING * spread) & (spread > _ROUNDING**2 * exact.square())
        deviation = (squares.clamp(min=0.0) / (compared - 1).clamp(min=1)).sqrt()
        advantages = torch.where(known, advantages / (deviation + STD_EPSILON), advantages)
    return advantages.float()


def with_group_advantages(
    batch: TrainBatch, rewards: Sequence[float], groups: torch.Tensor, settings: GroupSettings
) -> TrainBatch:
    """The batch with each sample's group-relative advantage at all of its response tokens."""
    advantages = group_advantages(rewards, groups, settings)
    return replace(batch, advantages=advantages[:, None] * batch.response_mask)


def with_gae(batch: TrainBatch, rewards: Sequence[float], settings: GaeSettings) -> TrainBatch:
    """The batch with advantages and returns from the critic's `values` and one terminal reward per sample.

    Raises:
        ValueError: the batch lacks values, or the log-probabilities that a KL in the reward needs.
    """
    if batch.values is None:
        raise ValueError("GAE needs the critic's values in the batch (got None)")
    mask = batch.token_mask
    each = terminal_rewards(torch.tensor(rewards, dtype=torch.float32), mask)
    if settings.kl is not None:
        if batch.prev_logprobs is None or batch.reference_logprobs is None:
            raise ValueError("a KL in the reward needs prev_logprobs and reference_logprobs in the batch (got None)")
        penalty = settings.kl.penalty * kl_estimate(batch.prev_logprobs, batch.reference_logprobs, settings.kl)
        each = each - penalty.masked_fill(mask == 0, 0.0)
    found = generalized_advantages(each, batch.values, mask, gamma=settings.gae_gamma, lam=settings.gae_lambda)
    advantages = whiten(found.advantages, mask) if settings.normalize_advantages else found.advantages
    return replace(batch, advantages=advantages, returns=found.returns)


def terminal_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length]`: each row's reward at its last token that counts, 0 elsewhere and in rows without any."""
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1, keepdim=True)
    return torch.zeros_like(mask).scatter(1, last, rewards[:, None]) * mask


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> Gae:
    """Generalised advantage estimation over the tokens of `mask`; all shapes are `[batch, length]`.

    With d_t = r_t + gamma V_(t+1) - V_t, the advantage is the sum of (gamma lam)^k d_(t+k), and the return is advantage
    plus value. After a row's last token the value is 0, a response cut off by the length included. Tokens between two
    that count are passed over as if they weren't there.

    >>> rewards, values, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.5]]), torch.ones(1, 3)
    >>> generalized_advantages(rewards, values, mask, gamma=1.0, lam=1.0).advantages.tolist()
    [[0.5, 0.75, 0.5]]
    """
    counts = mask.bool()
    rewards, values = rewards.double(), values.double()
    advantage, value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for step in range(values.shape[1] - 1, -1, -1):
        here = counts[:, step]
        error = rewards[:, step] + gamma * value - values[:, step]
        advantage = torch.where(here, error + gamma * lam * advantage, advantage)
        value = torch.where(here, values[:, step], value)
        advantages[:, step] = torch.where(here, advantage, 0.0)
    returns = torch.where(counts, advantages + values, 0.0)
    return Gae(advantages.float(), returns.float())


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and (unbiased) variance 1 over the entries of `mask`, 0 elsewhere; nothing but the mean if all are equal.

    Over the whole batch: call it before the batch is split over ranks.
    """
    counts = mask.bool()
    chosen = values[counts].double()
    if chosen.numel() < 2:
        return torch.zeros_like(values)
    white = (chosen - chosen.mean()) * torch.rsqrt(chosen.var() + _WHITENING_EPSILON)
    return torch.zeros_like(values).masked_scatter(counts, white.to(values.dtype))


def _group_sum(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """For each sample the sum over its group."""
    return torch.zeros(int(index.max()) + 1, dtype=values.dtype).index_add(0, index, values)[index]
