"""The KL estimators against exact divergences of small distributions, in value and in gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from refit_transport.rl.kl import kl_estimate, kl_penalty
from refit_transport.rl.settings import KlSettings

FREE = KlSettings(penalty=0.7, input_clamp=None, output_clamp=None)


@pytest.mark.parametrize(("kl_type", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_by_hand(kl_type: str, value: float) -> None:
    settings = replace(FREE, kl_type=kl_type)
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert kl_estimate(logprobs, reference, settings).item() == pytest.approx(value)
    assert kl_penalty(logprobs, reference, settings).item() == pytest.approx(0.7 * value)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_mean_and_gradient_are_the_divergences(kl_type: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)

    weights = policy.exp().detach()
    settings = replace(FREE, kl_type=kl_type)
    assert (weights * kl_estimate(policy, reference, settings)).sum().item() == pytest.approx(exact.item())
    (estimated,) = torch.autograd.grad((weights * kl_penalty(policy, reference, settings)).sum(), logits)
    torch.testing.assert_close(estimated, 0.7 * slope)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_clamps(kl_type: str) -> None:
    far = torch.tensor([[-50.0]], requires_grad=True)
    near = KlSettings(penalty=1.0, kl_type=kl_type, input_clamp=2.0, output_clamp=None)
    inside = kl_estimate(torch.tensor([[-2.0]]), torch.zeros(1, 1), near)
    penalty = kl_penalty(far, torch.zeros(1, 1), near)
    assert penalty.item() == pytest.approx(inside.item())
    penalty.backward()
    assert far.grad.item() == 0
    both = replace(near, output_clamp=1.5)
    assert abs(kl_estimate(far, torch.zeros(1, 1), both).item()) == 1.5
    within = torch.tensor([[-1.9]], requires_grad=True)
    penalty = kl_penalty(within, torch.zeros(1, 1), both)
    assert abs(penalty.item()) == 1.5
    penalty.backward()
    assert within.grad.item() == 0
