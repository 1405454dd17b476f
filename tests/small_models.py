"""A small config of every architecture that presets know: the same structure, few and small parts."""

from __future__ import annotations

from typing import Any

from refit_transport.layout.presets.model import LogicalModel

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 48,
    "vocab_size": 250,
}
_ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GDN = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 8,
    "num_experts": 8,
    "full_attention_interval": 4,
    **_ROUTED,
}
_MLA = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
_DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
_MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 4,
    "ssm_state_size": 6,
    "conv_kernel": 4,
    "use_conv_bias": True,
}
_SIGLIP = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 2,
    "image_size": 8,
    "num_channels": 3,
    "vision_use_head": False,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_TEXT},
    "llama with biases": {"architectures": ["LlamaForCausalLM"], **_TEXT, "attention_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], **_TEXT},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_TEXT},
    "qwen3 tied": {"architectures": ["Qwen3ForCausalLM"], **_TEXT, "tie_word_embeddings": True},
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **_TEXT,
        **_ROUTED,
        "num_experts": 8,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "qwen3 next": {"architectures": ["Qwen3NextForCausalLM"], **_TEXT, **_GDN},
    "qwen3.5 moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _TEXT | _GDN,
        "vision_config": _QWEN_VISION,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **_TEXT,
        **_ROUTED,
        **_MLA,
        **_DEEPSEEK,
        "num_key_value_heads": 8,
        "q_lora_rank": 10,
    },
    "deepseek without q lora": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **_TEXT,
        **_ROUTED,
        **_MLA,
        **_DEEPSEEK,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
    },
    "deepseek v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **_TEXT,
        **_ROUTED,
        **_MLA,
        **_DEEPSEEK,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "topk_method": "greedy",
    },
    "glm": {
        "architectures": ["Glm4MoeForCausalLM"],
        **_TEXT,
        **_ROUTED,
        **_DEEPSEEK,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_TEXT, "num_local_experts": 8},
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], **_TEXT, "num_local_experts": 8, "attention_bias": True},
    "gemma": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": _TEXT,
        "vision_config": _SIGLIP,
        "tie_word_embeddings": True,
    },
    "gemma 1": {"architectures": ["GemmaForCausalLM"], **_TEXT},
    "gemma text": {"architectures": ["Gemma3ForCausalLM"], **_TEXT},
    "nemotron dense": {"architectures": ["NemotronHForCausalLM"], **_TEXT, **_MAMBA, "hybrid_override_pattern": "M-M*"},
    "nemotron moe": {
        "architectures": ["NemotronHForCausalLM"],
        **_TEXT,
        **_MAMBA,
        **_ROUTED,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 12,
        "hybrid_override_pattern": "MEM*",
    },
}


_VLLM_SIZES: dict[str, int] = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
}


def vllm_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Sizes that vLLM's kernels take, of what this config has."""
    return {key: size for key, size in _VLLM_SIZES.items() if config.get(key)}


def qwen(
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 251,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    experts: int = 0,
    moe_intermediate: int = 48,
    shared: int = 0,
    dense: tuple[int, ...] = (),
    tied: bool = False,
    qkv_bias: bool = False,
) -> LogicalModel:
    """A Qwen3 of these sizes; with experts in all layers but the `dense` ones, or with Qwen2's biases."""
    kind = "Qwen3MoeForCausalLM" if experts else "Qwen2ForCausalLM" if qkv_bias else "Qwen3ForCausalLM"
    config: dict[str, Any] = {
        "architectures": [kind],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
    }
    if experts:
        config |= {"num_experts": experts, "moe_intermediate_size": moe_intermediate, "mlp_only_layers": list(dense)}
        config |= {"shared_expert_intermediate_size": shared, "num_experts_per_tok": 2}
    return LogicalModel.from_config(config)
