"""One row per kind of Megatron-core parameter: its keys, the checkpoint tensors in it, and their row order. Pure.

One rule covers every fused parameter: its rows are `groups` equal blocks, and each block holds an equal share of each
part, in order. QKV has a block per query group (its q heads | k | v); gate/up is one block (gate | up); a plain
parameter is one block of one part. A new architecture adds rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from refit_transport.layout.model_shape import ModelShape

Scope = Literal["model", "layer", "dense_layer", "moe_layer"]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor inside a Megatron parameter: its name in the scope, and its dims as `ModelShape` sizes."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of Megatron parameter.

    `keys` are its spellings inside the scope: the normalised (TransformerEngine) one first. `row_dim` is the dim of the
    checkpoint tensor whose elements are Megatron's rows: 1 where experts are stacked in dim 0. `groups` and `needs` are
    `ModelShape` sizes: the number of blocks of rows, and a size or flag without which the parameter doesn't exist.
    `padded` allows Megatron more rows than the checkpoint has; they are no logical elements. How ranks divide a
    parameter isn't said here: a live model says it itself.
    """

    scope: Scope
    keys: tuple[str, ...]
    parts: tuple[Part, ...]
    groups: str = "1"
    row_dim: int = 0
    needs: str = "1"
    padded: bool = False

    def exists(self, model: ModelShape, layer: int) -> bool:
        """Whether the model has this parameter, in this layer (any number where the scope is the model)."""
        in_scope = {
            "model": True,
            "layer": 0 <= layer < model.layers,
            "dense_layer": 0 <= layer < model.layers and layer not in model.moe_layers,
            "moe_layer": layer in model.moe_layers,
        }
        return in_scope[self.scope] and model.size(self.needs) > 0


TABLE: tuple[Row, ...] = (
    Row(
        "model",
        ("embedding.word_embeddings.weight",),
        (Part("model.embed_tokens.weight", ("vocab", "hidden")),),
        padded=True,
    ),
    Row("model", ("decoder.final_layernorm.weight",), (Part("model.norm.weight", ("hidden",)),)),
    Row(
        "model",
        ("output_layer.weight",),
        (Part("lm_head.weight", ("vocab", "hidden")),),
        needs="untied",
        padded=True,
    ),
    Row(
        "layer",
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        (Part("input_layernorm.weight", ("hidden",)),),
    ),
    Row(
        "layer",
        ("self_attention.linear_qkv.weight",),
        (
            Part("self_attn.q_proj.weight", ("q_rows", "hidden")),
            Part("self_attn.k_proj.weight", ("kv_rows", "hidden")),
            Part("self_attn.v_proj.weight", ("kv_rows", "hidden")),
        ),
        groups="kv_heads",
    ),
    Row(
        "layer",
        ("self_attention.linear_qkv.bias",),
        (
            Part("self_attn.q_proj.bias", ("q_rows",)),
            Part("self_attn.k_proj.bias", ("kv_rows",)),
            Part("self_attn.v_proj.bias", ("kv_rows",)),
        ),
        groups="kv_heads",
        needs="qkv_bias",
    ),
    Row(
        "layer",
        ("self_attention.q_layernorm.weight",),
        (Part("self_attn.q_norm.weight", ("head_dim",)),),
        needs="qk_norm",
    ),
    Row(
        "layer",
        ("self_attention.k_layernorm.weight",),
        (Part("self_attn.k_norm.weight", ("head_dim",)),),
        needs="qk_norm",
    ),
    Row(
        "layer",
        ("self_attention.linear_proj.weight",),
        (Part("self_attn.o_proj.weight", ("hidden", "q_rows")),),
    ),
    Row(
        "layer",
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (Part("post_attention_layernorm.weight", ("hidden",)),),
    ),
    Row(
        "dense_layer",
        ("mlp.linear_fc1.weight",),
        (
            Part("mlp.gate_proj.weight", ("intermediate", "hidden")),
            Part("mlp.up_proj.weight", ("intermediate", "hidden")),
        ),
    ),
    Row(
        "dense_layer",
        ("mlp.linear_fc2.weight",),
        (Part("mlp.down_proj.weight", ("hidden", "intermediate")),),
    ),
    Row("moe_layer", ("mlp.router.weight",), (Part("mlp.gate.weight", ("experts", "hidden")),)),
    Row(
        "moe_layer",
        ("mlp.experts.experts.linear_fc1.weight",),
        (
            Part("mlp.experts.gate_proj.weight", ("experts", "moe_intermediate", "hidden")),
            Part("mlp.experts.up_proj.weight", ("experts", "moe_intermediate", "hidden")),
        ),
        row_dim=1,
    ),
    Row(
        "moe_layer",
        ("mlp.experts.experts.linear_fc2.weight",),
        (Part("mlp.experts.down_proj.weight", ("experts", "hidden", "moe_intermediate")),),
        row_dim=1,
    ),
    Row(
        "moe_layer",
        ("mlp.shared_experts.linear_fc1.weight",),
        (
            Part("mlp.shared_expert.gate_proj.weight", ("shared_intermediate", "hidden")),
            Part("mlp.shared_expert.up_proj.weight", ("shared_intermediate", "hidden")),
        ),
        needs="shared_intermediate",
    ),
    Row(
        "moe_layer",
        ("mlp.shared_experts.linear_fc2.weight",),
        (Part("mlp.shared_expert.down_proj.weight", ("hidden", "shared_intermediate")),),
        needs="shared_intermediate",
    ),
    Row(
        "moe_layer",
        ("mlp.shared_experts.gate_weight",),
        (Part("mlp.shared_expert_gate.weight", ("1", "hidden")),),
        needs="shared_intermediate",
    ),
)
