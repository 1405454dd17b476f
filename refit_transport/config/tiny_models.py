"""The small models that `run` can make of each architecture: a table of kinds, as Hugging Face's configs spell them.

Sizes are as small as vLLM's CPU kernels take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

TinyKind = Literal[
    "dense",
    "moe",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "glm",
    "gpt_oss",
    "nemotron_h",
    "nemotron_h_moe",
    "gemma",
]
PATTERN = "hybrid_override_pattern"

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    # Large enough that a tensor in the wrong place shows in what an untrained model computes.
    "initializer_range": 0.08,
}
_ROUTED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    **_GROUPED,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
}
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 8,
}


@dataclass(frozen=True, slots=True)
class TinyShape:
    """One kind: Hugging Face's classes are `{name}Config` and `{name}ForCausalLM`; `config` are keys of the former."""

    name: str
    config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return f"{self.name}ForCausalLM"

    @property
    def experts_key(self) -> str | None:
        """How this config spells the number of experts; None where it has none."""
        return next(
            (key for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in self.config), None
        )


def _shape(name: str, **more: Any) -> TinyShape:
    return TinyShape(name, _SIZES | more)


TINY_MODELS: Mapping[TinyKind, TinyShape] = {
    "dense": _shape("Qwen3"),
    "moe": _shape("Qwen3Moe", **_ROUTED, decoder_sparse_step=1),
    "llama": _shape("Llama"),
    "mistral": _shape("Mistral", sliding_window=None),
    "mixtral": _shape("Mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    # Its heads share the hidden size, whatever `head_dim` says.
    "qwen2": _shape("Qwen2", hidden_size=128),
    "qwen3_next": _shape(
        "Qwen3Next",
        **_ROUTED,
        shared_expert_intermediate_size=64,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "deepseek_v2": _shape(
        "DeepseekV2", **(_LATENT | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1})
    ),
    "deepseek_v3": _shape("DeepseekV3", **_LATENT, num_nextn_predict_layers=0),
    "glm": _shape(
        "Glm4Moe",
        **(_GROUPED | {"n_shared_experts": 1}),
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=0,
    ),
    "gpt_oss": _shape(
        "GptOss",
        num_local_experts=8,
        num_experts_per_tok=2,
        attention_bias=True,
        sliding_window=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
    "nemotron_h": _shape("NemotronH", **_MAMBA, **{PATTERN: "M-M*"}),
    "nemotron_h_moe": _shape(
        "NemotronH",
        **_MAMBA,
        **{PATTERN: "ME*M-"},
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=1.5,
    ),
    "gemma": _shape("Gemma", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
}


def tiny_config(kind: TinyKind, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A kind's whole config with some keys changed; a pattern of layers says how many there are.

    >>> tiny_config("nemotron_h", {"hybrid_override_pattern": "M*"})["num_hidden_layers"]
    2
    """
    shape = TINY_MODELS[kind]
    config = {"architectures": [shape.architecture], **shape.config, **changes}
    return config | ({"num_hidden_layers": len(config[PATTERN])} if PATTERN in config else {})
