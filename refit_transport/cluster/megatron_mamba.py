"""Megatron's hybrid models: a stack of Mamba, attention, MLP and expert layers, one mixer each.

Apart from the other models, because Megatron's Mamba imports triton, and wants kernels (see `mamba_cpu`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm import mamba_block, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from refit_transport.cluster.megatron_specs import SequenceParallelRMSNorm, attention_spec, experts_spec


def mamba_model(megatron: TransformerConfig, *, pattern: str, **options: Any) -> MambaModel:
    """A hybrid model's chunk. `pattern` has a letter for each layer of the whole model: M, *, - or E."""
    return MambaModel(
        megatron,
        _stack(megatron),
        hybrid_override_pattern=pattern,
        position_embedding_type="none",
        **options,
    )


def _stack(megatron: TransformerConfig) -> ModuleSpec:
    """The layers of each kind; Megatron's own spec is of TransformerEngine's modules only."""
    # The norm behind the last layer is no part of the spec.
    mamba_block.TENorm = SequenceParallelRMSNorm
    mixer = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=SequenceParallelRMSNorm,
        mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=SequenceParallelRMSNorm, self_attention=attention_spec(), self_attn_bda=get_bias_dropout_add
    )
    projections = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def feed_forward(mlp: ModuleSpec) -> TransformerLayerSubmodules:
        return TransformerLayerSubmodules(
            pre_mlp_layernorm=SequenceParallelRMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        )

    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=mamba),
        "attention_layer": ModuleSpec(TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(MLPLayer, submodules=feed_forward(ModuleSpec(MLP, submodules=projections))),
    }
    if megatron.num_moe_experts:
        layers["moe_layer"] = ModuleSpec(TransformerLayer, submodules=feed_forward(experts_spec(megatron)))
    return ModuleSpec(mamba_block.MambaStack, submodules=mamba_block.MambaStackSubmodules(**layers))
