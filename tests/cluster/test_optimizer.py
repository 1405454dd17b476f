"""AdamW on master weights: narrow gradients add up, settings are checked, state goes in and out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refit_transport.cluster.optimizer import Optimizer, OptimizerSettings


def test_gradients_of_narrow_weights_add_up_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(betas=(0.5, 0.5)))
    for _ in range(400):
        weight.sum().backward()
    optimizer.step()
    # bfloat16 stops at 256.
    assert optimizer.state()["exp_avg"]["w"].tolist() == [200.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_to_another_optimizer(dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Parameter, Optimizer]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3).to(dtype))
        return weight, Optimizer({"w": weight}, OptimizerSettings(1e-2, 0.1))

    def step(weight: nn.Parameter, optimizer: Optimizer, factor: float) -> None:
        optimizer.zero_grad()
        (weight.float() ** 2 * factor).sum().backward()
        optimizer.step()

    (weight, optimizer), (other, copy) = make(), make()
    step(weight, optimizer, 1.0)
    for kind, tensors in copy.state().items():
        tensors["w"].copy_(optimizer.state()[kind]["w"])
    copy.restored(optimizer.updates)
    assert torch.equal(weight, other)
    for pair in ((weight, optimizer), (other, copy)):
        step(*pair, -3.0)
    assert torch.equal(weight, other)
    assert copy.updates == 2
    for kind, tensors in copy.state().items():
        assert torch.equal(tensors["w"], optimizer.state()[kind]["w"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learning_rate": -1.0}, "learning rate"),
        ({"weight_decay": -0.1}, "weight decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OptimizerSettings(**settings)  # type: ignore[arg-type]
