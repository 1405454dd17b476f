"""What Megatron's config of each architecture has beyond the common parts, from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

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
    refused = tuple(_not_covered(facts))
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
        "rotary_base": float(nested.get("rope_theta") or facts.get("rope_theta") or 10000.0),
        "rotary_percent": float(nested.get("partial_rotary_factor") or facts.get("partial_rotary_factor") or 1.0),
        **scaling,
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


def _not_covered(facts: Facts) -> Iterator[Violation]:
    kind, activation = _rope_type(facts), facts.get("hidden_act") or "silu"
    llama3 = kind == "llama3" and all(_rope(facts).get(key) == value for key, value in _LLAMA3.items())
    if not (kind == "default" or llama3):
        reason = "only plain rotary embeddings and Llama 3's are built"
        yield Violation("rope_parameters.rope_type", kind, reason, "")
    if activation != "silu":
        yield Violation("hidden_act", str(activation), "only silu is built", "")
    if facts.flag("use_sliding_window") or ("use_sliding_window" not in facts.config and facts.flag("sliding_window")):
        value = str(facts.get("use_sliding_window") or facts.get("sliding_window"))
        yield Violation("use_sliding_window", value, "sliding-window attention isn't built", "")
    biased = facts.flag("attention_bias") and facts.get("model_type") != "glm4_moe"
    if biased or facts.flag("mlp_bias"):
        name = "attention_bias" if biased else "mlp_bias"
        reason = "a bias on the output projection isn't built" if biased else "a bias in the MLP isn't built"
        yield Violation(name, "True", reason, "")
