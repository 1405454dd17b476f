"""Megatron models that training workers don't build: their kernels need a GPU, so plain torch stands in for those here.

What is under test is Megatron's own: modules, parameters, `sharded_state_dict()`. A stand-in computes what the kernel
computes, and never names or cuts a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from refit_transport.cluster.training import TrainingWorker


class HybridWorker(TrainingWorker):
    """A training worker for the architectures below. Their presets say what fits; here it only loads and scores."""

    def _model_chunks(self, *, dtype: torch.dtype, vocab: int) -> Sequence[Any]:
        build = BUILDERS[self._model.architecture]
        return (build(self._facts, self._model, self._cut, dtype=dtype, vocab=vocab),)


class GatedRMSNorm(nn.Module):
    """mamba_ssm's norm of groups, without a gate: the scan below has applied it."""

    def __init__(self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, **factory: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = nn.Parameter(torch.ones(size, **factory))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2) * self.weight


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
    """mamba_ssm's `mamba_split_conv1d_scan_combined`, one token after the other. `packed` is [batch, length, rows]."""
    heads = len(decay)
    inner = heads * headdim
    state_size = (packed.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, convolved, dt = packed.split((inner, inner + 2 * ngroups * state_size, heads), -1)
    width = weight.shape[-1]
    convolved = functional.conv1d(
        functional.pad(convolved.transpose(1, 2), (width - 1, 0)), weight[:, None], bias, groups=len(weight)
    )
    x, b, c = functional.silu(convolved.transpose(1, 2)).split((inner, ngroups * state_size, ngroups * state_size), -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (each.unflatten(-1, (ngroups, state_size)).repeat_interleave(heads // ngroups, dim=2) for each in (b, c))
    dt = functional.softplus(dt + dt_bias)
    state, outputs = torch.zeros(len(x), heads, headdim, state_size), []
    for t in range(x.shape[1]):
        fed = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = state * torch.exp(dt[:, t] * decay)[..., None, None] + fed
        outputs.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1).flatten(-2) * functional.silu(z)


def _install_mamba_kernels() -> None:
    """As if mamba_ssm were installed, before Megatron's mixer is imported."""
    if "mamba_ssm" in sys.modules:
        return
    parts = {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": scan,
        },
    }
    for name, contents in {"mamba_ssm": {}, "mamba_ssm.ops": {}, "mamba_ssm.ops.triton": {}, **parts}.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module


def _plain(model: Any, cut: Any, *, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    from refit_transport.cluster.megatron_model import _PLAIN_KERNELS, _parallel_options

    return {
        "num_layers": model.layers,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        **_parallel_options(cut),
        **_PLAIN_KERNELS,
        **options,
    }


def _attention(facts: Any) -> dict[str, Any]:
    return {
        "hidden_size": facts.size("hidden_size"),
        "num_attention_heads": facts.size("num_attention_heads"),
        "num_query_groups": facts.size("num_key_value_heads"),
        "kv_channels": facts.size("head_dim"),
    }


def nemotron(facts: Any, model: Any, cut: Any, *, dtype: torch.dtype, vocab: int) -> Any:
    """Mamba, attention, MLP and expert layers in the order of the config."""
    _install_mamba_kernels()
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from refit_transport.cluster.megatron_model import SequenceParallelRMSNorm as Norm
    from refit_transport.layout.presets.families import _pattern

    mamba_block.TENorm = Norm
    pattern = _pattern(facts, "hybrid_override_pattern")
    routed = {
        "num_moe_experts": model.experts,
        "moe_ffn_hidden_size": facts.size("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": facts.size("moe_shared_expert_intermediate_size"),
        "moe_router_topk": facts.size("num_experts_per_tok"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(facts.get("routed_scaling_factor") or 1.0),
    }
    config = TransformerConfig(
        **_plain(
            model,
            cut,
            dtype=dtype,
            **_attention(facts),
            ffn_hidden_size=facts.size("intermediate_size"),
            activation_func=squared_relu,
            gated_linear_unit=False,
            add_bias_linear=False,
            layernorm_epsilon=1e-5,
            is_hybrid_model=True,
            mamba_num_heads=facts.size("mamba_num_heads"),
            mamba_head_dim=facts.size("mamba_head_dim"),
            mamba_num_groups=facts.size("n_groups"),
            mamba_state_dim=facts.size("ssm_state_size"),
            **(routed if "E" in pattern else {}),
        )
    )
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=LocalSpecProvider().core_attention(),
        linear_proj=RowParallelLinear,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    moe = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    spec = ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=Norm, mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
                ),
            ),
            attention_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=Norm,
                    self_attention=ModuleSpec(
                        SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=Norm, mlp=ModuleSpec(MLP, submodules=mlp), mlp_bda=get_bias_dropout_add
                ),
            ),
            moe_layer=ModuleSpec(
                TransformerLayer,
                submodules=TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=moe, mlp_bda=get_bias_dropout_add),
            ),
        ),
    )
    return MambaModel(
        config,
        spec,
        vocab_size=vocab,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=pattern,
        parallel_output=True,
        position_embedding_type="none",
    )


def _gpt(config: Any, spec: Any, *, vocab: int, **options: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="rope",
        **options,
    )


def gpt_oss(facts: Any, model: Any, cut: Any, *, dtype: torch.dtype, vocab: int) -> Any:
    """Attention sinks, biases, and a clamped activation between interleaved gate and up projections."""
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from refit_transport.cluster.megatron_families import rotary_options
    from refit_transport.cluster.megatron_model import SequenceParallelRMSNorm, _replaced

    config = TransformerConfig(
        **_plain(
            model,
            cut,
            dtype=dtype,
            **_attention(facts),
            layernorm_epsilon=facts.get("rms_norm_eps"),
            ffn_hidden_size=facts.size("intermediate_size"),
            num_moe_experts=model.experts,
            moe_ffn_hidden_size=facts.size("intermediate_size"),
            moe_router_topk=facts.size("num_experts_per_tok"),
            add_bias_linear=True,
            gated_linear_unit=True,
            activation_func=quick_gelu,
            activation_func_clamp_value=7.0,
            glu_linear_offset=1.0,
            softmax_type="learnable",
        )
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    spec = _replaced(spec, {WrappedTorchNorm: SequenceParallelRMSNorm})
    return _gpt(config, spec, vocab=vocab, **rotary_options(facts))


def qwen_next(facts: Any, model: Any, cut: Any, *, dtype: torch.dtype, vocab: int) -> Any:
    """Gated DeltaNet layers with a gated attention layer after every third; norms are zero-centred, all of them."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from refit_transport.cluster.megatron_families import rotary_options
    from refit_transport.cluster.megatron_model import SequenceParallelRMSNorm

    class Norm(SequenceParallelRMSNorm):
        """As TransformerEngine's with `layernorm_zero_centered_gamma`."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    linear = [int(kind == "linear_attention") for kind in facts.get("layer_types")]
    config = TransformerConfig(
        **_plain(
            model,
            cut,
            dtype=dtype,
            **_attention(facts),
            layernorm_epsilon=facts.get("rms_norm_eps"),
            layernorm_zero_centered_gamma=True,
            qk_layernorm=True,
            attention_output_gate=True,
            experimental_attention_variant="gated_delta_net",
            deterministic_mode=True,
            linear_attention_freq=linear,
            linear_num_key_heads=facts.size("linear_num_key_heads"),
            linear_num_value_heads=facts.size("linear_num_value_heads"),
            linear_key_head_dim=facts.size("linear_key_head_dim"),
            linear_value_head_dim=facts.size("linear_value_head_dim"),
            linear_conv_kernel_dim=facts.size("linear_conv_kernel_dim"),
            ffn_hidden_size=facts.size("intermediate_size"),
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=functional.silu,
            num_moe_experts=model.experts,
            moe_ffn_hidden_size=facts.size("moe_intermediate_size"),
            moe_router_topk=facts.size("num_experts_per_tok"),
            moe_router_pre_softmax=not facts.flag("norm_topk_prob"),
            moe_shared_expert_intermediate_size=facts.size("shared_expert_intermediate_size"),
            moe_shared_expert_gate=True,
        )
    )
    full = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=LocalSpecProvider().core_attention(),
            linear_proj=RowParallelLinear,
            q_layernorm=Norm,
            k_layernorm=Norm,
        ),
    )
    recurrent = ModuleSpec(
        gated_delta_net.GatedDeltaNet,
        submodules=gated_delta_net.GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear
        ),
    )
    first = get_transformer_layer_offset(config)
    layers = [
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=recurrent if linear[layer] else full,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=Norm,
                mlp=get_moe_module_spec(use_te=False, num_experts=model.experts, moe_grouped_gemm=False),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in range(first, first + get_num_layers_to_build(config))
    ]
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    return _gpt(config, spec, vocab=vocab, **rotary_options(facts))


BUILDERS: dict[str, Callable[..., Any]] = {
    "NemotronHForCausalLM": nemotron,
    "GptOssForCausalLM": gpt_oss,
    "Qwen3NextForCausalLM": qwen_next,
}
