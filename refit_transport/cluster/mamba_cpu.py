"""Plain torch in place of mamba_ssm's kernels, which need a GPU: they compute the same, differentiably."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class GroupedRMSNorm(nn.Module):
    """mamba_ssm's norm of groups, without a gate: the scan has applied it."""

    def __init__(self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        if norm_before_gate:
            raise NotImplementedError("the norm before the gate")
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().reshape(*x.shape[:-1], -1, self.group_size)
        scaled: torch.Tensor = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2).to(x.dtype) * self.weight


def scan(
    packed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    *,
    D: torch.Tensor,  # noqa: N803 - the kernel's name
    headdim: int,
    ngroups: int,
    **_options: Any,
) -> torch.Tensor:
    """mamba_ssm's `mamba_split_conv1d_scan_combined`: convolution, selective scan in fp32, gate.

    `packed` [batch, length, rows] are the rows z | x | B | C | dt of each token; `weight` [x and B and C, width] is the
    convolution's, `decay` [heads] is -exp(A_log). Returns [batch, length, heads x headdim].

    A head's state [headdim, state] starts at 0 and becomes, token by token, `state * exp(dt * decay) + dt * x B'`;
    the output is `state C + D x`. Written as one masked product over all pairs of tokens, which is exact and as large
    as attention's.
    """
    heads = len(decay)
    inner = heads * headdim
    state_size = (packed.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, convolved, dt = torch.split(packed, [inner, inner + 2 * ngroups * state_size, heads], -1)
    width = weight.shape[-1]
    convolved = functional.conv1d(
        functional.pad(convolved.transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=len(weight)
    )
    sizes = [inner, ngroups * state_size, ngroups * state_size]
    x, b, c = torch.split(functional.silu(convolved.transpose(1, 2)).float(), sizes, -1)
    x = x.reshape(*x.shape[:2], heads, headdim)
    b, c = (
        each.reshape(*each.shape[:2], ngroups, state_size).repeat_interleave(heads // ngroups, dim=2) for each in (b, c)
    )
    dt = functional.softplus(dt.float() + dt_bias.float())
    passed = (dt * decay.float()).cumsum(1).transpose(1, 2)
    # [batch, heads, to, from]: how much of a token's state is left at a later one.
    kept = (passed[..., :, None] - passed[..., None, :]).masked_fill(_future(passed), -torch.inf).exp()
    weights = torch.einsum("bthn,bshn->bhts", c, b) * kept * dt.transpose(1, 2)[..., None, :]
    outputs: torch.Tensor = torch.einsum("bhts,bshp->bthp", weights, x) + D.float()[:, None] * x
    return outputs.flatten(-2).to(z.dtype) * functional.silu(z)


def _future(passed: torch.Tensor) -> torch.Tensor:
    length = passed.shape[-1]
    return torch.ones(length, length, dtype=torch.bool, device=passed.device).triu(1)


@contextmanager
def standing_in() -> Iterator[None]:
    """As if mamba_ssm were installed, while Megatron's mixer is first imported: a class of it derives from the norm."""
    kernels: dict[str, object] = {"mamba_chunk_scan_combined": None, "mamba_split_conv1d_scan_combined": scan}
    parts: dict[str, dict[str, object]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GroupedRMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": kernels,
    }
    kept = {name: sys.modules[name] for name in parts if name in sys.modules}
    for name, contents in parts.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for name in parts:
            del sys.modules[name]
        sys.modules.update(kept)
