"""What Megatron-core 0.16.1 needs to run on CPU and gloo. The one place for it; nothing here runs where CUDA does.

Everything that its configuration allows is done in `megatron_model`; these are the rest, each with its reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_latent_attention, utils
from megatron.core.transformer.moe import moe_utils

_CPU = torch.device("cpu")


class _TorchOnCpu:
    """`torch` as one Megatron module sees it: tensors that it creates on "cuda" come to be on the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return partial(_on_cpu, found) if name in ("zeros", "ones") else found


def _on_cpu(create: Callable[..., torch.Tensor], *size: Any, device: object = None, **options: Any) -> torch.Tensor:
    return create(*size, device="cpu" if device == "cuda" else device, **options)


def current_device_is_cpu() -> None:
    """Rotary embeddings, router, pipeline and TP collectives allocate on `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]


def schedules_count_tokens_on_cpu() -> None:
    """The schedules allocate their token counter with the literal `device="cuda"`."""
    schedules.torch = _TorchOnCpu()


def router_without_transformer_engine() -> None:
    """The router tests `te_general_gemm`, which is never bound when TransformerEngine isn't installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def latent_attention_without_transformer_engine() -> None:
    """Latent attention takes TransformerEngine for installed wherever Megatron's adapter to it can be imported."""
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def masks_are_made_on_cpu() -> None:
    """The masks of attention windows are made with the literal `device="cuda"`."""
    utils.torch = _TorchOnCpu()


def gated_delta_net_without_fla() -> None:
    """Megatron has the delta rule in plain torch itself (`deterministic_mode`), but takes a norm from fla.

    Before 0.16 it has no such layers.
    """
    if importlib.util.find_spec("megatron.core.ssm.gated_delta_net") is None:
        return
    from megatron.core.ssm import gated_delta_net

    if not gated_delta_net.HAVE_FLA:
        gated_delta_net.HAVE_FLA = True
        gated_delta_net.l2norm = _l2norm


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@contextmanager
def tied_embeddings_stay_on_cpu() -> Iterator[None]:
    """While a model is built: tied embeddings on several pipeline stages call `weight.data.cuda()`."""
    if torch.cuda.is_available():
        yield
        return
    to_cuda = torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *_args, **_options: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = to_cuda  # type: ignore[method-assign]


def apply() -> None:
    """Applies all of it to this process for good, unless a CUDA device is there. Idempotent."""
    if not torch.cuda.is_available():
        current_device_is_cpu()
        schedules_count_tokens_on_cpu()
        router_without_transformer_engine()
        latent_attention_without_transformer_engine()
        masks_are_made_on_cpu()
        gated_delta_net_without_fla()
