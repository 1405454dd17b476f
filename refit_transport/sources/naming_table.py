"""One row per kind of Megatron-core parameter: its keys, and the checkpoint tensors in it, in order. Pure.

One rule covers every parameter: its rows are equal blocks, one block or one per query group, and each block holds an
equal share of each part, in order. A part is a checkpoint tensor, or a field of one that packs several things. Names
and sizes of checkpoint tensors aren't repeated here: a row applies where the model's outline has its first part, and
all its sizes come from there. How ranks divide a parameter isn't said here either: a live model says it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["model", "layer", "drafter"]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor inside a Megatron parameter, by its name in the scope, or one field of it.

    `field` counts the fields of the tensor's packing (see `layout.presets.rows`); None is all of it.
    """

    name: str
    field: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of Megatron parameter.

    `keys` are its spellings inside the scope: the normalised (TransformerEngine) one first. Scope "layer" is a decoder
    layer, or the transformer layer of a drafter (multi-token prediction); "drafter" what else a drafter's layer has.
    With `grouped` there is a block of rows per query group. `padded` allows Megatron more rows than the checkpoint has;
    they are no logical elements. `shared_as` is the name of a drafter's own copy, which Megatron doesn't keep apart.
    `flagged`: Megatron's modules always say at the parameter that tensor parallelism cuts it. `recentred`: it is stored
    less 1 where Megatron's config has zero-centred norms, if it is a norm. `beside` names another
    tensor of the layer without which the row doesn't apply. Of several rows with a key, the first that applies counts.
    """

    scope: Scope
    keys: tuple[str, ...]
    parts: tuple[Part, ...]
    grouped: bool = False
    padded: bool = False
    flagged: bool = True
    recentred: bool = True
    shared_as: str = ""
    beside: str = ""


def _model(keys: tuple[str, ...], *names: str, padded: bool = False, shared_as: str = "") -> tuple[Row, ...]:
    """A parameter outside of the layers, which is one tensor, under one of these names."""
    return tuple(Row("model", keys, (Part(name),), padded=padded, shared_as=shared_as) for name in names)


def _layer(keys: tuple[str, ...] | str, *names: str, beside: str = "") -> tuple[Row, ...]:
    """A parameter of a layer, which is one tensor, under one of these names."""
    spellings = (keys,) if isinstance(keys, str) else keys
    return tuple(Row("layer", spellings, (Part(name),), beside=beside) for name in names)


def _drafter(key: str, *names: str) -> tuple[Row, ...]:
    return tuple(Row("drafter", (key,), (Part(name),)) for name in names)


def _fields(key: str, names: str, tensor: str) -> tuple[Row, ...]:
    """A packed parameter, which Megatron describes field by field, each under a name of its own."""
    return tuple(Row("layer", (f"{key}.{name}",), (Part(tensor, field),)) for field, name in enumerate(names.split()))


def _gated(key: str, gate: str, up: str) -> Row:
    """A gated pair of projections, gate rows first. Several experts' pairs are several parameters."""
    return Row("layer", (key,), (Part(gate), Part(up)))


def _experts(key: str, *parts: Part) -> Row:
    """Routed experts, whose number Megatron gives as a dim. TransformerEngine's experts carry no flags."""
    return Row("layer", (f"mlp.experts.experts.{key}",), parts, flagged=False)


_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"

_ENDS: tuple[Row, ...] = (
    *_model(
        ("embedding.word_embeddings.weight",),
        "embed_tokens.weight",
        "embeddings.weight",
        padded=True,
        shared_as="embed_tokens.weight",
    ),
    *_model(("output_layer.weight",), "lm_head.weight", padded=True, shared_as="shared_head.head.weight"),
    *_model(("decoder.final_layernorm.weight", "decoder.final_norm.weight"), "norm.weight", "norm_f.weight"),
)

_NORMS: tuple[Row, ...] = (
    # Every layer of Nemotron-H is one mixer behind one norm.
    *_layer(
        (
            "self_attention.linear_qkv.layer_norm_weight",
            "mlp.linear_fc1.layer_norm_weight",
            "mixer.in_proj.layer_norm_weight",
            "norm.weight",
            "input_layernorm.weight",
            "pre_mlp_layernorm.weight",
        ),
        "norm.weight",
    ),
    *_layer(
        (
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.in_proj.layer_norm_weight",
            "input_layernorm.weight",
        ),
        "input_layernorm.weight",
    ),
    # Gemma has norms behind attention and MLP too, as megatron-bridge names them.
    *_layer(
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        "pre_feedforward_layernorm.weight",
        "post_attention_layernorm.weight",
    ),
    *_layer(
        "self_attention.linear_proj.post_layernorm.weight",
        "post_attention_layernorm.weight",
        beside="pre_feedforward_layernorm.weight",
    ),
    *_layer("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)


def _attention(module: str) -> tuple[Row, ...]:
    """Attention with key-value heads. A gated one has a group's gates behind the group's queries."""
    q, k, v = (f"{module}.{part}_proj" for part in "qkv")
    rows = [
        Row(
            "layer",
            ("self_attention.linear_qkv.weight",),
            (Part(f"{q}.weight", 0), Part(f"{q}.weight", 1), Part(f"{k}.weight"), Part(f"{v}.weight")),
            grouped=True,
        )
    ]
    rows += [
        Row(
            "layer", (f"self_attention.linear_qkv.{kind}",), tuple(Part(f"{p}.{kind}") for p in (q, k, v)), grouped=True
        )
        for kind in ("weight", "bias")
    ]
    rows += _layer("self_attention.linear_proj.weight", f"{module}.o_proj.weight")
    return (*rows, *_layer("self_attention.linear_proj.bias", f"{module}.o_proj.bias"))


_ATTENTION: tuple[Row, ...] = (
    *_attention("self_attn"),
    *_attention("mixer"),
    *_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    Row("layer", ("self_attention.core_attention.softmax_offset",), (Part("self_attn.sinks"),), flagged=False),
    *_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", beside="self_attn.kv_b_proj.weight"),
    *_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    *_layer(
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        "self_attn.q_a_layernorm.weight",
        "self_attn.q_norm.weight",
    ),
    *_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    *_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    *_layer(
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        "self_attn.kv_a_layernorm.weight",
    ),
    *_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
)

_GDN = "self_attention"
_RECURRENT: tuple[Row, ...] = (
    *_fields("mixer.in_proj.weight", "z x B C dt", "mixer.in_proj.weight"),
    *_fields("mixer.conv1d.weight", "x B C", "mixer.conv1d.weight"),
    *_fields("mixer.conv1d.bias", "x B C", "mixer.conv1d.bias"),
    *(row for name in ("A_log", "D", "dt_bias") for row in _layer(f"mixer.{name}", f"mixer.{name}")),
    Row("layer", ("mixer.norm.weight",), (Part("mixer.norm.weight"),), recentred=False),
    *_layer("mixer.out_proj.weight", "mixer.out_proj.weight"),
    # Gated DeltaNet: two packed projections (Qwen3-Next), or four (Qwen3.5).
    *_fields(f"{_GDN}.in_proj.weight", "query key value z", "linear_attn.in_proj_qkvz.weight"),
    *_fields(f"{_GDN}.in_proj.weight", "beta alpha", "linear_attn.in_proj_ba.weight"),
    *_fields(f"{_GDN}.in_proj.weight", "query key value", "linear_attn.in_proj_qkv.weight"),
    *_layer(f"{_GDN}.in_proj.weight.z", "linear_attn.in_proj_z.weight"),
    *_layer(f"{_GDN}.in_proj.weight.beta", "linear_attn.in_proj_b.weight"),
    *_layer(f"{_GDN}.in_proj.weight.alpha", "linear_attn.in_proj_a.weight"),
    *_fields(f"{_GDN}.conv1d.weight", "query key value", "linear_attn.conv1d.weight"),
    *(row for name in ("A_log", "dt_bias") for row in _layer(f"{_GDN}.{name}", f"linear_attn.{name}")),
    *_layer(f"{_GDN}.out_norm.weight", "linear_attn.norm.weight"),
    *_layer(f"{_GDN}.out_proj.weight", "linear_attn.out_proj.weight"),
)


_MLP: tuple[Row, ...] = (
    _gated(f"mlp.{_FC1}", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    *_layer(f"mlp.{_FC1}", "mixer.up_proj.weight"),
    *_layer(f"mlp.{_FC2}", "mlp.down_proj.weight", "mixer.down_proj.weight"),
    *_layer(
        "mlp.router.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight", "mixer.gate.weight"
    ),
    *_layer("mlp.router.bias", "mlp.router.bias"),
    *_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "mixer.gate.e_score_correction_bias"),
    _experts(_FC1, Part("mlp.experts.gate_proj.weight"), Part("mlp.experts.up_proj.weight")),
    _experts(_FC1, Part("block_sparse_moe.experts.w1.weight"), Part("block_sparse_moe.experts.w3.weight")),
    _experts(_FC1, Part("mlp.experts.gate_up_proj", 0), Part("mlp.experts.gate_up_proj", 1)),
    _experts(_FC1, Part("mixer.experts.up_proj.weight")),
    _experts("linear_fc1.bias", Part("mlp.experts.gate_up_proj_bias", 0), Part("mlp.experts.gate_up_proj_bias", 1)),
    *(
        _experts(_FC2, Part(name))
        for name in (
            "mlp.experts.down_proj.weight",
            "block_sparse_moe.experts.w2.weight",
            "mlp.experts.down_proj",
            "mixer.experts.down_proj.weight",
        )
    ),
    _experts("linear_fc2.bias", Part("mlp.experts.down_proj_bias")),
    *(
        _gated(f"mlp.shared_experts.{_FC1}", f"mlp.{shared}.gate_proj.weight", f"mlp.{shared}.up_proj.weight")
        for shared in ("shared_experts", "shared_expert")
    ),
    *_layer(f"mlp.shared_experts.{_FC1}", "mixer.shared_experts.up_proj.weight"),
    *_layer(
        f"mlp.shared_experts.{_FC2}",
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "mixer.shared_experts.down_proj.weight",
    ),
    *_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    *(
        row
        for name in ("fc1_latent_proj", "fc2_latent_proj")
        for row in _layer(f"mlp.{name}.weight", f"mixer.{name}.weight")
    ),
)

_DRAFTER: tuple[Row, ...] = (
    *_drafter("enorm.weight", "enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    *_drafter("hnorm.weight", "hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    *_drafter("eh_proj.weight", "eh_proj.weight", "mtp.fc.weight"),
    *_drafter("final_layernorm.weight", "shared_head.norm.weight", "mtp.norm.weight"),
)

TABLE: tuple[Row, ...] = (*_ENDS, *_NORMS, *_ATTENTION, *_RECURRENT, *_MLP, *_DRAFTER)
