"""Per-token estimates of the Kullback-Leibler divergence from the policy to its reference."""

from __future__ import annotations

import torch

from refit_transport.rl.settings import KlSettings


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, settings: KlSettings) -> torch.Tensor:
    """Schulman's estimate of KL(policy || reference) from tokens that the policy sampled, without the penalty's factor.

    All shapes are `[batch, length]`. With d = log reference - log policy: k1 is -d, k2 is d^2 / 2, k3 is e^d - 1 - d.
    The mean of k1 and of k3 over the policy's samples is the divergence.

    >>> kl_estimate(torch.tensor([0.0]), torch.tensor([-1.0]), KlSettings(kl_type="k1")).item()
    1.0
    """
    return _clamp(_raw(_clamp(reference_logprobs - logprobs, settings.input_clamp), settings), settings.output_clamp)


def kl_penalty(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, settings: KlSettings) -> torch.Tensor:
    """The penalty per token `[batch, length]`, in value `settings.penalty` times the estimate.

    Its gradient also has the part that comes from which tokens are sampled: without it, the mean gradient of k1 would
    be zero and that of k3 another divergence's. Where a clamp applies there is no gradient at all.
    """
    difference = reference_logprobs - logprobs
    clamped = _clamp(difference, settings.input_clamp)
    sampled = torch.exp(logprobs - logprobs.detach())
    weight = torch.where(difference == clamped, sampled, sampled.detach())
    return settings.penalty * _clamp(weight * _raw(clamped, settings), settings.output_clamp)


def _raw(difference: torch.Tensor, settings: KlSettings) -> torch.Tensor:
    match settings.kl_type:
        case "k1":
            return -difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(difference) - difference
        case unknown:
            raise ValueError(f"the KL type must be k1, k2 or k3 (got {unknown})")


def _clamp(values: torch.Tensor, limit: float | None) -> torch.Tensor:
    return values if limit is None else values.clamp(-limit, limit)
