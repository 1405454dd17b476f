"""Plain-weights mode of vLLM on CPU: every parameter stays as it was loaded, and computation reads it.

vLLM's CPU kernels compute with packed copies: linear weights are emptied after packing, expert weights are packed in
place. That makes a refit stage and pack whole layers, and its packed expert kernel doesn't know expert parallelism
(vLLM 0.32 crashes). In this mode linear layers use `torch.nn.functional.linear` and experts a loop over the live
`w13_weight` and `w2_weight` that honours the expert map. Experts without a gate (Nemotron-H), for which vLLM has no CPU
kernel, run too. Slower, and meant for tests, small models and proofs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from refit_transport.integrations.vllm_seams import attribute, require_parameters, seam_error

_UTILS = "vllm.model_executor.layers.utils"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_CONFIG = "vllm.model_executor.layers.fused_moe.config"
_APPLY = (
    "self",
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "global_num_experts",
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
    "apply_router_weight_on_input",
)
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul")


def use_plain_weights() -> None:
    """Switches this process's vLLM to plain weights; does nothing the second time.

    Raises:
        SeamError: vLLM isn't as we know it, or runs on something else than CPU.
    """
    if not attribute("vllm.platforms", "current_platform").is_cpu():
        raise seam_error("plain-weights mode", "the CPU platform")
    _patch_linear()
    _patch_experts()
    _permit_ungated_experts()


def _patch_linear() -> None:
    current = attribute(_UTILS, "dispatch_cpu_unquantized_gemm")
    if current is _keep_weight:
        return
    require_parameters(current, f"{_UTILS}:dispatch_cpu_unquantized_gemm", ("layer", "remove_weight"))
    for user in ("vllm.model_executor.layers.linear", "vllm.model_executor.layers.vocab_parallel_embedding"):
        if hasattr(import_module(user), "dispatch_cpu_unquantized_gemm"):
            raise seam_error(user, "dispatch_cpu_unquantized_gemm looked up at each call")
    import_module(_UTILS).dispatch_cpu_unquantized_gemm = _keep_weight  # type: ignore[attr-defined]


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001, FBT001 - vLLM's signature
    """Stands in for vLLM's choice of a packed matrix product. Convolutions (3-D) fall back to unpacked kernels."""
    weight = layer.weight
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        layer.cpu_linear = functional.linear  # type: ignore[assignment]


def _patch_experts() -> None:
    base = attribute(_EXPERTS, "CPUUnquantizedExperts")
    if base.apply is _apply_experts:
        return
    require_parameters(base.apply, f"{_EXPERTS}:CPUUnquantizedExperts.apply", _APPLY)
    seam = f"{_EXPERTS}:CPUUnquantizedExperts.process_weights_after_loading"
    require_parameters(base.process_weights_after_loading, seam, ("self", "layer"))
    for subclass in base.__subclasses__():
        if {"apply", "process_weights_after_loading", "_supports_activation"} & set(vars(subclass)):
            raise seam_error(f"{_EXPERTS}:{subclass.__name__}", "it to inherit how experts are packed and applied")
    base.apply = _apply_experts
    base.process_weights_after_loading = _keep_expert_weights
    # vLLM asks this when it builds the model, so an unknown activation fails there and not in the first request.
    base._supports_activation = staticmethod(_supports_activation)


def _permit_ungated_experts() -> None:
    """vLLM refuses them on CPU in the last check of the layer's config."""
    owner = attribute(_CONFIG, "FusedMoEConfig")
    original = owner.__post_init__
    if getattr(original, "permits_ungated", False):
        return
    require_parameters(original, f"{_CONFIG}:FusedMoEConfig.__post_init__", ("self",))

    def __post_init__(self: Any) -> None:  # noqa: N807 - vLLM's method
        try:
            original(self)
        except NotImplementedError as error:
            if not str(error).startswith("is_act_and_mul=False is supported only for"):
                raise

    __post_init__.permits_ungated = True  # type: ignore[attr-defined]
    owner.__post_init__ = __post_init__
    attribute(_EXPERTS, "CPUUnquantizedExperts")._supports_no_act_and_mul = staticmethod(lambda: True)


def _supports_activation(activation: Any) -> bool:
    return activation.value in _ACTIVATIONS


def _keep_expert_weights(self: Any, layer: torch.nn.Module) -> None:
    """Stands in for vLLM's packing of experts."""


def _apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,  # noqa: ARG001 - vLLM's signature
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,  # noqa: ARG001
    a2_scale: torch.Tensor | None,  # noqa: ARG001
    workspace13: torch.Tensor,  # noqa: ARG001
    workspace2: torch.Tensor,  # noqa: ARG001
    expert_tokens_meta: Any,  # noqa: ARG001
    apply_router_weight_on_input: bool,  # noqa: FBT001
) -> None:
    """Sums each token's local experts into `output` [tokens, hidden]; other ranks' experts add nothing.

    `w1` is [experts, 2 x intermediate, hidden] with the gates first (gpt-oss: with gate and up rows in turn; without
    gates: [experts, intermediate, hidden]), `w2` [experts, hidden, intermediate].
    """
    ids = topk_ids.long() if expert_map is None else expert_map.to(topk_ids.device)[topk_ids.long()]
    total = torch.zeros(hidden_states.shape[0], w2.shape[1], dtype=torch.float32, device=hidden_states.device)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        bias1 = None if self.w1_bias is None else self.w1_bias[expert]
        bias2 = None if self.w2_bias is None else self.w2_bias[expert]
        gated = _activate(activation, functional.linear(hidden_states[tokens], w1[expert], bias1))
        hidden = functional.linear(gated, w2[expert], bias2).float()
        if not apply_router_weight_on_input:
            hidden *= topk_weights[tokens, choices].float().unsqueeze(1)
        total.index_add_(0, tokens, hidden)
    output.copy_(total)


def _activate(activation: Any, projected: torch.Tensor) -> torch.Tensor:
    """The experts' inner values of gate and up projections, [tokens, 2 x intermediate], or of up alone (`no_mul`)."""
    if activation.value == "swigluoai":
        return _swiglu_oai(projected)
    if activation.value == "relu2_no_mul":
        return functional.relu(projected).square()
    gate, up = projected.chunk(2, dim=-1)
    if activation.value == "silu":
        return functional.silu(gate) * up
    if activation.value in ("gelu", "gelu_tanh"):
        return functional.gelu(gate, approximate="tanh" if activation.value == "gelu_tanh" else "none") * up
    raise seam_error("plain-weights mode", f"an expert activation of {', '.join(_ACTIVATIONS)}, not {activation.value}")


def _swiglu_oai(projected: torch.Tensor) -> torch.Tensor:
    """gpt-oss's: clamped at 7, with sigmoid(1.702 x gate), as vLLM's CPU kernel has it built in."""
    gate, up = projected[..., ::2].clamp(max=7.0), projected[..., 1::2].clamp(min=-7.0, max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)
