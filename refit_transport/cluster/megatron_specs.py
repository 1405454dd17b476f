"""What Megatron's models are made of, from its local classes: the module spec of each kind of decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn import functional


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm marked for sequence parallelism; Megatron's own wrapper of torch's norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_ignored: object) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron reads this attribute; torch's Parameter doesn't declare it.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class ZeroCenteredRMSNorm(SequenceParallelRMSNorm):
    """Scales by 1 more than its weight, as TransformerEngine's norm with `layernorm_zero_centered_gamma`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Attention whose values are of another width than its queries; Megatron's own local class takes one width.

    Latent attention builds one without widths first, and throws it away.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        if k_channels is not None and v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            self.hidden_size_per_attention_head = k_channels


class OwnedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron adds an expert's bias to this layer's output in place; autograd refuses that where it is a mere view."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return (output.clone() if self.is_expert else output), bias


def decoder_spec(megatron: TransformerConfig, *, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a GPT model's chunk. `stage` counts the chunks of a rank; None where it has one."""
    if getattr(megatron, "experimental_attention_variant", None) == "gated_delta_net":
        return _gated_delta_net_spec(megatron, stage=stage)
    spec = get_gpt_decoder_block_spec(megatron, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    changes: dict[object, object] = {}
    if megatron.sequence_parallel:
        changes[WrappedTorchNorm] = SequenceParallelRMSNorm
    if megatron.layernorm_zero_centered_gamma:
        changes[WrappedTorchNorm] = ZeroCenteredRMSNorm
    if megatron.num_moe_experts and megatron.add_bias_linear:
        changes[RowParallelLinear] = OwnedRowParallelLinear
    if megatron.multi_latent_attention:
        changes[DotProductAttention] = LatentDotProductAttention
    return _replaced(spec, changes)


def _replaced(spec: Any, changes: Mapping[object, object]) -> Any:
    """A copy of a module spec in which other classes stand for some of Megatron's."""
    if isinstance(spec, type):
        return changes.get(spec, spec)
    if isinstance(spec, list):
        return [_replaced(item, changes) for item in spec]
    if dataclasses.is_dataclass(spec):
        parts = {field.name: _replaced(getattr(spec, field.name), changes) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)  # type: ignore[type-var]
    return spec


def _gated_delta_net_spec(megatron: TransformerConfig, *, stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's own spec of these layers is of TransformerEngine's modules only."""
    from megatron.core.ssm import gated_delta_net

    recurrent = ModuleSpec(
        gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=ZeroCenteredRMSNorm, out_proj=RowParallelLinear
        ),
    )
    full = attention_spec(q_layernorm=ZeroCenteredRMSNorm, k_layernorm=ZeroCenteredRMSNorm)
    first = get_transformer_layer_offset(megatron, vp_stage=stage)
    layers = [
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=ZeroCenteredRMSNorm,
                self_attention=recurrent if megatron.linear_attention_freq[layer] else full,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=ZeroCenteredRMSNorm,
                mlp=experts_spec(megatron),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in range(first, first + get_num_layers_to_build(megatron, vp_stage=stage))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCenteredRMSNorm)


def attention_spec(**norms: type) -> ModuleSpec:
    """Attention with key-value heads, with norms of queries and keys if they are given."""
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=LocalSpecProvider().core_attention(),
        linear_proj=RowParallelLinear,
        **norms,
    )
    return ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


def experts_spec(megatron: TransformerConfig) -> ModuleSpec:
    """Routed experts, each with parameters of its own, and the shared ones that the config asks for."""
    return get_moe_module_spec(use_te=False, num_experts=megatron.num_moe_experts, moe_grouped_gemm=False)
