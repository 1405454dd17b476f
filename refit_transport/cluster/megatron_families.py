"""What Megatron's config of each architecture has beyond the common parts, from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.nn import functional

from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.model import LogicalModel

Options = dict[str, Any]


def family_options(facts: Facts, model: LogicalModel) -> Options:
    """Fields of Megatron's TransformerConfig, or MLATransformerConfig where `multi_latent_attention` is among them.

    Raises:
        ConfigError: the architecture can't be trained here, or the config asks for something that this mapping doesn't
            cover.
    """
    family = FAMILIES.get(model.architecture)
    if family is None:
        reason = f"training of it isn't built; built: {', '.join(FAMILIES)}"
        raise facts.error("architectures", model.architecture, reason)
    refused = tuple(_not_covered(facts, model.architecture))
    if refused:
        raise ConfigError(facts.source, refused)
    heads, hidden = facts.size("num_attention_heads"), facts.size("hidden_size")
    common = {
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": facts.size("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": facts.size("num_key_value_heads", default=heads),
        "kv_channels": facts.size("head_dim", default=max(1, hidden // heads)),
        "layernorm_epsilon": facts.get("rms_norm_eps") or 1e-6,
    }
    return common | family(facts, model)


def rotary_options(facts: Facts) -> Options:
    """Arguments of GPTModel: transformers 5 nests them; 10000 is the default of every supported architecture."""
    nested = _rope(facts)
    scaling = {"rope_scaling": True, "rope_scaling_factor": nested["factor"]} if _rope_type(facts) == "llama3" else {}
    return {
        "position_embedding_type": "yarn" if _rope_type(facts) == "yarn" else "rope",
        "rotary_base": float(nested.get("rope_theta") or facts.get("rope_theta") or 10000.0),
        "rotary_percent": float(nested.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1.0),
        **scaling,
    }


def yarn_attributes(facts: Facts) -> Options:
    """What Megatron looks up in its config for YaRN outside of latent attention, though the class has no such fields.

    Empty for other rotary embeddings: where the attributes are, attention applies YaRN's scale.
    """
    if _rope_type(facts) != "yarn":
        return {}
    nested = _rope(facts)
    longest = facts.size("max_position_embeddings")
    return {
        "yarn_rotary_scaling_factor": float(nested["factor"]),
        "yarn_original_max_position_embeddings": int(nested.get("original_max_position_embeddings") or longest),
        "yarn_beta_fast": float(nested.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(nested.get("beta_slow") or 1.0),
        "yarn_mscale": nested.get("mscale"),
        "yarn_mscale_all_dim": nested.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": bool(nested.get("truncate", True)),
    }


def _dense(_facts: Facts, _model: LogicalModel, **options: bool) -> Options:
    return dict(options)


def _sparse(facts: Facts, model: LogicalModel, **options: bool) -> Options:
    """Qwen3 with experts, and Mixtral, whose experts' width is `intermediate_size`."""
    always = model.architecture == "MixtralForCausalLM"
    return {
        **options,
        **_experts(facts, model),
        # Softmax over the chosen experts only is the same as renormalising the full softmax's top k.
        "moe_router_pre_softmax": not (always or facts.flag("norm_topk_prob")),
        "moe_ffn_hidden_size": facts.size("moe_intermediate_size", "intermediate_size"),
    }


def _deepseek_experts(facts: Facts, model: LogicalModel) -> Options:
    """Sigmoid scores that a bias corrects for the choice (DeepSeek-V3, GLM-4.5), or a softmax (DeepSeek-V2)."""
    corrected = facts.get("topk_method") not in ("greedy", "group_limited_greedy")
    size, groups = facts.size("moe_intermediate_size"), facts.size("n_group", default=1)
    score: Options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {
        **_experts(facts, model),
        **(score if corrected else {"moe_router_pre_softmax": True}),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": facts.size("topk_group")} if groups > 1 else {}),
        "moe_router_topk_scaling_factor": float(facts.get("routed_scaling_factor") or 1.0),
        "moe_ffn_hidden_size": size,
        "moe_shared_expert_intermediate_size": facts.count("n_shared_experts") * size or None,
    }


def _deepseek(facts: Facts, model: LogicalModel) -> Options:
    return {
        **_deepseek_experts(facts, model),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": facts.count("q_lora_rank") or None,
        "kv_lora_rank": facts.size("kv_lora_rank"),
        "qk_head_dim": facts.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": facts.size("qk_rope_head_dim"),
        "v_head_dim": facts.size("v_head_dim"),
        "rope_type": "rope",
        "rotary_base": rotary_options(facts)["rotary_base"],
        # Without it Megatron scales attention as YaRN would.
        "rotary_scaling_factor": 1.0,
    }


def _glm(facts: Facts, model: LogicalModel) -> Options:
    return {
        **_deepseek_experts(facts, model),
        "add_qkv_bias": facts.flag("attention_bias"),
        "qk_layernorm": facts.flag("use_qk_norm"),
    }


def _gpt_oss(facts: Facts, model: LogicalModel) -> Options:
    """Attention sinks, windows in some layers, biases, a clamped activation between interleaved gate and up."""
    from megatron.core.activations import quick_gelu

    listed = facts.get("layer_types") or [_GPT_OSS_LAYERS[layer % 2] for layer in range(model.layers)]
    windows: Options = {}
    if facts.get("sliding_window"):
        windows["window_size"] = (facts.size("sliding_window") - 1, 0)
        windows["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in listed]
    return {
        **_experts(facts, model),
        **windows,
        "moe_ffn_hidden_size": facts.size("intermediate_size"),
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": _CLAMP,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


_GPT_OSS_LAYERS = ("sliding_attention", "full_attention")


def _qwen_next(facts: Facts, model: LogicalModel) -> Options:
    """Gated DeltaNet layers with a gated attention layer after every third; norms are zero-centred, all of them."""
    recurrent = {tensor.layer for tensor in model.main if tensor.name.endswith("linear_attn.A_log")}
    return {
        **_sparse(facts, model, qk_layernorm=True),
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        # Chooses the chunked rule in plain torch, which needs no kernels.
        "deterministic_mode": True,
        "linear_attention_freq": [int(layer in recurrent) for layer in range(model.layers)],
        **{name: facts.size(name) for name in _LINEAR_ATTENTION},
        "moe_shared_expert_intermediate_size": facts.size("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


_LINEAR_ATTENTION = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _nemotron(facts: Facts, model: LogicalModel) -> Options:
    """Mamba, attention, MLP and expert layers, each of one mixer."""
    from megatron.core.activations import squared_relu

    options: Options = {
        "is_hybrid_model": True,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "layernorm_epsilon": _MAMBA_EPSILON,
        "mamba_num_heads": facts.size("mamba_num_heads"),
        "mamba_head_dim": facts.size("mamba_head_dim"),
        "mamba_num_groups": facts.size("n_groups"),
        "mamba_state_dim": facts.size("ssm_state_size"),
    }
    if not model.experts:
        return options
    # The pattern says which layers have experts.
    routed = {key: value for key, value in _deepseek_experts(facts, model).items() if key != "moe_layer_freq"}
    shared = facts.size("moe_shared_expert_intermediate_size")
    return {**options, **routed, "moe_shared_expert_intermediate_size": shared}


def _gemma(_facts: Facts, _model: LogicalModel) -> Options:
    """Zero-centred norms; `megatron_model` scales what the embedding gives."""
    return {"layernorm_zero_centered_gamma": True, "activation_func": partial(functional.gelu, approximate="tanh")}


FAMILIES: Mapping[str, Callable[[Facts, LogicalModel], Options]] = {
    "LlamaForCausalLM": _dense,
    "MistralForCausalLM": _dense,
    "Qwen2ForCausalLM": partial(_dense, add_qkv_bias=True),
    "Qwen3ForCausalLM": partial(_dense, qk_layernorm=True),
    "Qwen3MoeForCausalLM": partial(_sparse, qk_layernorm=True),
    "MixtralForCausalLM": _sparse,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
    "Glm4MoeForCausalLM": _glm,
    "GptOssForCausalLM": _gpt_oss,
    "Qwen3NextForCausalLM": _qwen_next,
    "NemotronHForCausalLM": _nemotron,
    "GemmaForCausalLM": _gemma,
}


def _experts(facts: Facts, model: LogicalModel) -> Options:
    """What every model with experts has; nothing where all of this one's layers are dense."""
    if not model.experts:
        return {}
    sparse = {tensor.layer for tensor in model.main if tensor.row.experts}
    options: Options = {
        "num_moe_experts": model.experts,
        "moe_router_topk": facts.size("num_experts_per_tok"),
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        # Gloo has no uneven all-to-all over several dims; all-gather works on every backend.
        "moe_token_dispatcher_type": "allgather",
    }
    if len(sparse) < model.layers:
        options["moe_layer_freq"] = [int(layer in sparse) for layer in range(model.layers)]
    return options


def _rope(facts: Facts) -> Mapping[str, Any]:
    return facts.get("rope_parameters") or facts.get("rope_scaling") or {}


def _rope_type(facts: Facts) -> str:
    return str(_rope(facts).get("rope_type", _rope(facts).get("type", "default")))


# Megatron's own constants.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLAMP, _MAMBA_EPSILON, _MAMBA_CONV = 7.0, 1e-5, 4


def _not_covered(facts: Facts, architecture: str) -> Iterator[Violation]:
    yield from _rotary_not_covered(facts, yarn=architecture == "GptOssForCausalLM")
    expected = _ACTIVATIONS.get(architecture, "silu")
    key = "mlp_hidden_act" if architecture == "NemotronHForCausalLM" else "hidden_act"
    if (activation := facts.get("hidden_activation") or facts.get(key) or expected) != expected:
        yield Violation(key, str(activation), f"only {expected} is built", "")
    if architecture != "GptOssForCausalLM":
        yield from _windows_and_biases(facts)
    yield from _constants(facts, architecture)


_ACTIVATIONS: Mapping[str, str] = {"NemotronHForCausalLM": "relu2", "GemmaForCausalLM": "gelu_pytorch_tanh"}


def _rotary_not_covered(facts: Facts, *, yarn: bool) -> Iterator[Violation]:
    kind = _rope_type(facts)
    llama3 = kind == "llama3" and all(_rope(facts).get(key) == value for key, value in _LLAMA3.items())
    if not (kind == "default" or llama3 or (yarn and kind == "yarn")):
        reason = "only plain rotary embeddings, Llama 3's and gpt-oss's YaRN are built"
        yield Violation("rope_parameters.rope_type", kind, reason, "")


def _windows_and_biases(facts: Facts) -> Iterator[Violation]:
    if facts.flag("use_sliding_window") or ("use_sliding_window" not in facts.config and facts.flag("sliding_window")):
        value = str(facts.get("use_sliding_window") or facts.get("sliding_window"))
        yield Violation("use_sliding_window", value, "sliding-window attention isn't built", "")
    biased = facts.flag("attention_bias") and facts.get("model_type") != "glm4_moe"
    if biased or facts.flag("mlp_bias"):
        name = "attention_bias" if biased else "mlp_bias"
        reason = "a bias on the output projection isn't built" if biased else "a bias in the MLP isn't built"
        yield Violation(name, "True", reason, "")


def _constants(facts: Facts, architecture: str) -> Iterator[Violation]:
    """What Megatron or vLLM has built in, where a config may say something else."""
    fixed: dict[str, object] = {"swiglu_limit": _CLAMP}
    if architecture == "NemotronHForCausalLM":
        fixed |= {
            "layer_norm_epsilon": _MAMBA_EPSILON,
            "conv_kernel": _MAMBA_CONV,
            "use_conv_bias": True,
            "use_bias": False,
            "mamba_proj_bias": False,
            "norm_topk_prob": True,
            "moe_latent_size": 0,
        }
    for key, value in fixed.items():
        if (given := facts.get(key)) is not None and given != value:
            yield Violation(key, str(given), f"only {value} is built", "")
