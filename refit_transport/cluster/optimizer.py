"""AdamW on fp32 weights, with all of its state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW's numbers; gradients whose norm exceeds `max_grad_norm` are scaled down to it (None: never).

    Raises:
        ValueError: a number is out of its range.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _require(self.learning_rate >= 0, "the learning rate must be at least 0", self.learning_rate)
        _require(self.weight_decay >= 0, "the weight decay must be at least 0", self.weight_decay)
        _require(all(0 <= beta < 1 for beta in self.betas), "each of Adam's betas must lie in [0, 1)", self.betas)
        _require(self.eps > 0, "Adam's eps must be positive", self.eps)
        if self.max_grad_norm is not None:
            _require(self.max_grad_norm > 0, "max_grad_norm must be positive, or None", self.max_grad_norm)


class Optimizer:
    """AdamW on fp32 weights: the parameters themselves, or master copies of narrower ones, whose gradients become fp32.

    So small gradients of many micro-batches and ranks add up.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters = dict(parameters)
        self._masters = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in self._parameters.items()
        }
        for parameter, _ in self._narrow():
            parameter.grad_dtype = torch.float32
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # torch makes these at the first step; a checkpoint may be taken or read before.
        for master in self._masters.values():
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> None:
        """One update from the parameters' gradients."""
        for parameter, master in self._narrow():
            master.grad = parameter.grad
        self._adamw.step()
        for _, master in self._narrow():
            master.grad = None
        self._publish()

    def weights_changed(self) -> None:
        """Something else wrote the parameters: the master copies follow."""
        with torch.no_grad():
            for parameter, master in self._narrow():
                master.copy_(parameter)

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The live fp32 tensors by kind (`weight`, `exp_avg`, `exp_avg_sq`), then parameter, and shaped like it.

        Who writes them calls `restored` afterwards.
        """
        found = {"weight": {name: master.detach() for name, master in self._masters.items()}}
        for kind in ("exp_avg", "exp_avg_sq"):
            found[kind] = {name: self._adamw.state[master][kind] for name, master in self._masters.items()}
        return found

    @property
    def updates(self) -> int:
        """How many updates this rank's parameters have had, with those before a restore."""
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    def restored(self, updates: int) -> None:
        """All of `state` was read from a checkpoint of that many updates."""
        for state in self._adamw.state.values():
            state["step"].fill_(updates)
        self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            for parameter, master in self._narrow():
                parameter.copy_(master)

    def _narrow(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        pairs = ((self._parameters[name], master) for name, master in self._masters.items())
        return [(parameter, master) for parameter, master in pairs if master is not parameter]


def _require(holds: bool, rule: str, got: object) -> None:  # noqa: FBT001
    if not holds:
        raise ValueError(f"{rule} (got {got})")
