"""Losses and advantages once more: loops over sequences and tokens in float64, without a tensor library's help."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from refit_transport.rl.settings import KlSettings, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch


def clamp(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def kl(logprob: float, reference: float, settings: KlSettings) -> float:
    d = reference - logprob
    if settings.input_clamp is not None:
        d = clamp(d, -settings.input_clamp, settings.input_clamp)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[settings.kl_type]
    return value if settings.output_clamp is None else clamp(value, -settings.output_clamp, settings.output_clamp)


def importance(log_weights: np.ndarray, settings: PolicyLossSettings) -> list[float]:
    """The weight of each token of one sequence."""
    chosen = settings.importance
    if chosen is None:
        return [1.0] * len(log_weights)
    weights = [math.exp(each) for each in log_weights]
    if settings.sequence_level_importance_ratios:
        weights = [math.exp(math.fsum(log_weights))] * len(log_weights)
    if chosen.truncation is None:
        return weights
    low, high = chosen.minimum or 0.0, chosen.maximum
    if chosen.truncation == "tis":
        return [clamp(each, low, high) for each in weights]
    if chosen.truncation == "icepop":
        return [each if low <= each <= high else 0.0 for each in weights]
    geometric = math.exp(math.fsum(log_weights) / len(log_weights))
    return weights if low <= geometric <= high else [0.0] * len(weights)


def policy_loss(logprobs: torch.Tensor, batch: TrainBatch, settings: PolicyLossSettings) -> float:
    """Of a whole batch."""
    current = logprobs.detach()
    losses: list[list[float]] = []
    for row in range(batch.size):
        at = np.flatnonzero(batch.response_mask[row].numpy())
        if not batch.sample_mask[row] or not len(at):
            continue

        def column(values: torch.Tensor, row: int = row, at: np.ndarray = at) -> np.ndarray:
            return values[row].double().numpy()[at]

        now, generation, advantages = column(current), column(batch.generation_logprobs), column(batch.advantages)
        previous = now if settings.force_on_policy_ratio else column(batch.prev_logprobs)
        weights = importance(previous - generation, settings)
        mean_log_ratio = math.fsum(now - previous) / len(at)
        tokens = []
        for t in range(len(at)):
            log_ratio = mean_log_ratio if settings.sequence_level_importance_ratios else now[t] - previous[t]
            ratio = math.exp(log_ratio)
            gain = min(
                ratio * advantages[t],
                clamp(ratio, 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max) * advantages[t],
            )
            if settings.ratio_clip_c is not None and advantages[t] < 0:
                gain = max(gain, settings.ratio_clip_c * advantages[t])
            loss = -weights[t] * gain
            if settings.kl is not None and settings.kl.penalty:
                reference = column(batch.reference_logprobs)
                loss += settings.kl.penalty * kl(now[t], reference[t], settings.kl)
            tokens.append(loss)
        losses.append(tokens)
    if settings.token_level_loss:
        return math.fsum(each for tokens in losses for each in tokens) / sum(map(len, losses))
    return math.fsum(math.fsum(each) / len(each) for each in losses) / len(losses)


def value_loss(values: torch.Tensor, batch: TrainBatch, settings: ValueLossSettings) -> float:
    current = values.detach().double().numpy()
    errors = []
    for row in range(batch.size):
        if not batch.sample_mask[row]:
            continue
        for t in np.flatnonzero(batch.response_mask[row].numpy()):
            value, target = current[row, t], float(batch.returns[row, t])
            error = (value - target) ** 2
            if settings.cliprange is not None:
                before = float(batch.values[row, t])
                near = clamp(value, before - settings.cliprange, before + settings.cliprange)
                error = max(error, (near - target) ** 2)
            errors.append(error)
    return settings.scale * 0.5 * math.fsum(errors) / len(errors)


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], *, leave_one_out: bool, normalize: bool, epsilon: float
) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        compared = [
            other for j, other in enumerate(rewards) if groups[j] == groups[i] and not (leave_one_out and j == i)
        ]
        advantage = reward - math.fsum(compared) / len(compared) if compared else 0.0
        if normalize and len(compared) > 1:
            deviation = float(np.std(np.array(compared), ddof=1))
            if deviation > 1e-5:
                advantage /= deviation + epsilon
        found.append(advantage)
    return found


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The explicit double sum over one sequence of tokens."""
    count = len(rewards)
    following = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    advantages = [math.fsum((gamma * lam) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]
    return advantages, [advantages[t] + values[t] for t in range(count)]
