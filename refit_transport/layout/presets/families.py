"""One function per model family: which rows its layers have, and what lies outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from refit_transport.layout.presets import blocks
from refit_transport.layout.presets.cuts import Vocabulary
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.rows import Group, Row, Rows, norm, replicated, under, whole, width, zero_centered
from refit_transport.layout.presets.vision import gemma_vision, qwen_vision


@dataclass(frozen=True, slots=True)
class Outline:
    """A model by rows: before the layers, each layer's, behind the layers, and what a refit leaves out.

    `prefix` and the layer's number precede the names of a layer's rows. The other rows have full names. `drafter` are
    the layers of multi-token prediction, `vision` the tower of a multimodal model.
    """

    first: Rows
    prefix: str
    layers: tuple[Rows, ...]
    last: Rows
    tied: bool = False
    drafter: Rows = ()
    vision: Rows = ()


def llama(facts: Facts) -> Outline:
    """Llama and Mistral: the config says whether q, k, v and o have a bias."""
    bias = facts.flag("attention_bias")
    attention = blocks.grouped_query_attention(facts, bias=bias, output_bias=bias, qk_norm=False, gated=False)
    layer = _layer(facts, self_attn=attention, mlp=blocks.dense_mlp(facts))
    return _decoder(facts, [layer] * facts.size("num_hidden_layers"))


def qwen(facts: Facts, *, bias: bool, qk_norm: bool, sparse: bool) -> Outline:
    """Qwen2, Qwen3, and Qwen3 with experts in all layers or some (`sparse`)."""
    attention = blocks.grouped_query_attention(facts, bias=bias, output_bias=False, qk_norm=qk_norm, gated=False)
    layers = range(facts.size("num_hidden_layers"))
    routed = frozenset(_sparse_layers(facts)) if sparse else frozenset()
    kinds = {}
    if routed:
        kinds[True] = _layer(facts, self_attn=attention, mlp=blocks.qwen_moe(facts, packed=False))
    if len(routed) < len(layers):
        kinds[False] = _layer(facts, self_attn=attention, mlp=blocks.dense_mlp(facts))
    return _decoder(facts, [kinds[number in routed] for number in layers])


def qwen_hybrid(facts: Facts, *, prefix: str, packed: bool) -> Outline:
    """Qwen3-Next and Qwen3.5 with experts: Gated DeltaNet layers with a full attention layer after every third.

    `packed`: projections of linear attention together and experts apart (Qwen3-Next), or the other way round (Qwen3.5).
    The drafter's experts are apart in both.
    """
    text, vision = facts.section("text_config"), facts.get("vision_config")
    attention = blocks.grouped_query_attention(text, bias=False, output_bias=False, qk_norm=True, gated=True)
    mlp = blocks.qwen_moe(text, packed=not packed)
    full = zero_centered(*_layer(text, self_attn=attention, mlp=mlp))
    mixer = under("linear_attn.", *blocks.gated_delta_net(text, packed=packed))
    linear = (*zero_centered(*_layer(text, mlp=mlp)), *mixer)
    drafters = text.count("mtp_num_hidden_layers")
    hidden = text.size("hidden_size")
    layer = _layer(text, self_attn=attention, mlp=blocks.qwen_moe(text, packed=False))
    drafter = [row for number in range(drafters) for row in under(f"mtp.layers.{number}.", *layer)]
    if drafters:
        drafter.append(replicated("mtp.fc", hidden, 2 * hidden, "mtp"))
        drafter += [norm(f"mtp.{name}", hidden) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    return _decoder(
        text,
        [full if kind == "full_attention" else linear for kind in _attention_kinds(text)],
        prefix=prefix,
        drafter=zero_centered(*drafter),
        centered=True,
        vision=qwen_vision(Facts(vision, facts.source, facts.problems)) if vision else (),
    )


def _attention_kinds(facts: Facts) -> list[str]:
    """The kind of each layer; older configs give the distance between full attention layers instead."""
    count, listed = facts.size("num_hidden_layers"), facts.get("layer_types")
    if listed is None:
        every = facts.size("full_attention_interval", default=4)
        return ["linear_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    if len(listed) != count or set(listed) - {"linear_attention", "full_attention"}:
        raise facts.error("layer_types", repr(listed), f"must name {count} layers linear_attention or full_attention")
    return list(listed)


def deepseek(facts: Facts) -> Outline:
    """DeepSeek-V2 and V3 and what is built like them (Kimi-K2, Moonlight): latent attention, first layers dense."""
    return _deepseek_like(facts, blocks.latent_attention(facts))


def glm4_moe(facts: Facts) -> Outline:
    """GLM-4.5: DeepSeek's MLPs behind grouped-query attention."""
    bias, qk_norm = facts.flag("attention_bias"), facts.flag("use_qk_norm")
    return _deepseek_like(
        facts, blocks.grouped_query_attention(facts, bias=bias, output_bias=False, qk_norm=qk_norm, gated=False)
    )


def mixtral(facts: Facts) -> Outline:
    """Mixtral: every layer has experts, whose width is `intermediate_size`."""
    hidden, count = facts.size("hidden_size"), facts.size("num_local_experts")
    attention = blocks.grouped_query_attention(facts, bias=False, output_bias=False, qk_norm=False, gated=False)
    routed = blocks.experts(count, hidden, facts.size("intermediate_size"), up=("w1", "w3"), down="w2")
    moe = (replicated("gate", count, hidden, "router"), *routed)
    return _decoder(facts, [_layer(facts, self_attn=attention, block_sparse_moe=moe)] * facts.size("num_hidden_layers"))


def gpt_oss(facts: Facts) -> Outline:
    """gpt-oss in BF16 form: biases everywhere, attention sinks, gate and up interleaved."""
    quantized = facts.get("quantization_config") or {}
    if quantized.get("quant_method") == "mxfp4":
        reason = "must not be there: MXFP4 weights can't be refitted; convert the checkpoint to BF16 and leave it out"
        raise facts.error("quantization_config", "mxfp4", reason)
    hidden, count = facts.size("hidden_size"), facts.size("num_local_experts")
    attention = blocks.grouped_query_attention(facts, bias=True, output_bias=True, qk_norm=False, gated=False)
    router = (replicated("router", count, hidden, "router"), whole("router.bias", (count,), "router"))
    moe = (*router, *blocks.interleaved_experts(count, hidden, facts.size("intermediate_size")))
    layer = _layer(facts, self_attn=(*attention, *blocks.attention_sinks(facts)), mlp=moe)
    return _decoder(facts, [layer] * facts.size("num_hidden_layers"))


def gemma(facts: Facts) -> Outline:
    """Gemma 1: Llama with zero-centred norms and tied embeddings."""
    attention = blocks.grouped_query_attention(facts, bias=False, output_bias=False, qk_norm=False, gated=False)
    layer = zero_centered(*_layer(facts, self_attn=attention, mlp=blocks.dense_mlp(facts)))
    return _decoder(facts, [layer] * facts.size("num_hidden_layers"), centered=True, tied=True)


def gemma3(facts: Facts) -> Outline:
    """Gemma 3: four norms a layer, tied embeddings, a vision tower in the larger ones."""
    text, vision = facts.section("text_config"), facts.get("vision_config")
    hidden = text.size("hidden_size")
    attention = blocks.grouped_query_attention(text, bias=False, output_bias=False, qk_norm=True, gated=False)
    layer = _layer(text, self_attn=attention, mlp=blocks.dense_mlp(text))
    extra = (norm("pre_feedforward_layernorm", hidden), norm("post_feedforward_layernorm", hidden))
    multimodal = text is not facts
    return _decoder(
        text,
        [zero_centered(*layer, *extra)] * text.size("num_hidden_layers"),
        centered=True,
        prefix="language_model.model." if multimodal else "model.",
        tied=True,
        vision=gemma_vision(Facts(vision, facts.source, facts.problems), hidden=hidden) if vision else (),
    )


def nemotron_h(facts: Facts) -> Outline:
    """Nemotron-H and Nemotron 3: every layer is one mixer, by the letters of a pattern: M Mamba, * attention, - MLP,
    E experts."""
    pattern = layer_pattern(facts, "hybrid_override_pattern")
    drafter: list[Row] = []
    kinds = {kind: _mixer(facts, kind) for kind in dict.fromkeys(pattern)}
    hidden, repeats = facts.size("hidden_size"), facts.count("num_nextn_predict_layers")
    draft = layer_pattern(facts, "mtp_hybrid_override_pattern") if repeats else ""
    for number, kind in enumerate(draft * repeats):
        rows = [*_mixer(facts, kind)]
        if number % len(draft) == 0:
            rows += [replicated("eh_proj", hidden, 2 * hidden, "mtp"), norm("enorm", hidden), norm("hnorm", hidden)]
        if number % len(draft) == len(draft) - 1:
            rows.append(norm("final_layernorm", hidden))
        drafter += under(f"mtp.layers.{number}.", *rows)
    return Outline(
        first=(_vocabulary(facts, "backbone.embeddings.weight", "embedding"),),
        prefix="backbone.layers.",
        layers=tuple(kinds[kind] for kind in pattern),
        last=(norm("backbone.norm_f", hidden), _vocabulary(facts, "lm_head.weight", "lm_head")),
        drafter=tuple(drafter),
    )


def _sparse_layers(facts: Facts) -> list[int]:
    """The layers that have experts."""
    dense, step = facts.get("mlp_only_layers") or [], facts.size("decoder_sparse_step", default=1)
    if not isinstance(dense, list):
        raise facts.error("mlp_only_layers", repr(dense), "must be a list")
    return [n for n in range(facts.size("num_hidden_layers")) if n not in dense and (n + 1) % step == 0]


FAMILIES: Mapping[str, Callable[[Facts], Outline]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": partial(qwen, bias=True, qk_norm=False, sparse=False),
    "Qwen3ForCausalLM": partial(qwen, bias=False, qk_norm=True, sparse=False),
    "Qwen3MoeForCausalLM": partial(qwen, bias=False, qk_norm=True, sparse=True),
    "Qwen3NextForCausalLM": partial(qwen_hybrid, prefix="model.", packed=True),
    "Qwen3_5MoeForConditionalGeneration": partial(qwen_hybrid, prefix="model.language_model.", packed=False),
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "Glm4MoeForCausalLM": glm4_moe,
    "MixtralForCausalLM": mixtral,
    "GptOssForCausalLM": gpt_oss,
    "GemmaForCausalLM": gemma,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "NemotronHForCausalLM": nemotron_h,
}

_LAYER_TYPES = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def layer_pattern(facts: Facts, key: str) -> str:
    """The letters of the layers; transformers 5 writes a list of words instead."""
    listed = "layers_block_type" if key.startswith("hybrid") else "mtp_layers_block_type"
    pattern = facts.get(key) or "".join(_LAYER_TYPES.get(word, "?") for word in facts.get(listed) or ())
    if not pattern or set(pattern) - set("M*-E"):
        raise facts.error(key, repr(facts.get(key)), "must be a pattern of the letters M, *, - and E")
    return str(pattern)


def _mixer(facts: Facts, kind: str) -> Rows:
    hidden = facts.size("hidden_size")
    if kind == "M":
        rows = blocks.mamba2(facts)
    elif kind == "*":
        rows = blocks.grouped_query_attention(facts, bias=False, output_bias=False, qk_norm=False, gated=False)
    elif kind == "-":
        rows = blocks.mlp(hidden, width(facts.size("intermediate_size"), "FFN width"), "ffn", names=("up_proj",))
    else:
        rows = _latent_moe(facts)
    return (norm("norm", hidden), *under("mixer.", *rows))


def _latent_moe(facts: Facts) -> Rows:
    """Experts of two projections, in a smaller hidden size where the model has one, beside a shared expert."""
    hidden, count = facts.size("hidden_size"), facts.size("n_routed_experts")
    inner = facts.size("moe_latent_size", default=hidden)
    rows = [replicated("gate", count, hidden, "router"), whole("gate.e_score_correction_bias", (count,), "router")]
    rows += blocks.experts(count, inner, facts.size("moe_intermediate_size"), up=("up_proj",), down="down_proj")
    if facts.get("moe_latent_size"):
        rows += [replicated("fc1_latent_proj", inner, hidden, "other")]
        rows += [replicated("fc2_latent_proj", hidden, inner, "other")]
    shared = width(facts.size("moe_shared_expert_intermediate_size"), "shared experts' width")
    return (*rows, *under("shared_experts.", *blocks.mlp(hidden, shared, "shared_expert", names=("up_proj",))))


def _deepseek_like(facts: Facts, attention: Rows) -> Outline:
    hidden, count = facts.size("hidden_size"), facts.size("num_hidden_layers")
    plain = min(facts.count("first_k_dense_replace"), count)
    sparse = _layer(facts, self_attn=attention, mlp=blocks.deepseek_moe(facts))
    layers = [_layer(facts, self_attn=attention, mlp=blocks.dense_mlp(facts))] * plain + [sparse] * (count - plain)
    drafter: list[Row] = []
    for number in range(count, count + facts.count("num_nextn_predict_layers", "num_mtp_layers")):
        rows = [*sparse, *(norm(name, hidden) for name in ("enorm", "hnorm", "shared_head.norm"))]
        rows.append(replicated("eh_proj", hidden, 2 * hidden, "mtp"))
        rows += [_vocabulary(facts, f"{name}.weight", "mtp") for name in ("embed_tokens", "shared_head.head")]
        drafter += under(f"model.layers.{number}.", *rows)
    return _decoder(facts, layers, drafter=drafter)


def _layer(facts: Facts, **parts: Rows) -> Rows:
    """A pre-norm layer: one norm before attention, one before the MLP."""
    hidden = facts.size("hidden_size")
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    return (*norms, *(row for name, rows in parts.items() for row in under(f"{name}.", *rows)))


def _decoder(
    facts: Facts,
    layers: Iterable[Rows],
    *,
    prefix: str = "model.",
    tied: bool | None = None,
    drafter: Iterable[Row] = (),
    vision: Rows = (),
    centered: bool = False,
) -> Outline:
    is_tied = facts.flag("tie_word_embeddings") if tied is None else tied
    head = () if is_tied else (_vocabulary(facts, "lm_head.weight", "lm_head"),)
    last = (norm(f"{prefix}norm", facts.size("hidden_size")),)
    return Outline(
        first=(_vocabulary(facts, f"{prefix}embed_tokens.weight", "embedding"),),
        prefix=f"{prefix}layers.",
        layers=tuple(layers),
        last=(*(zero_centered(*last) if centered else last), *head),
        tied=is_tied,
        drafter=tuple(drafter),
        vision=vision,
    )


def _vocabulary(facts: Facts, name: str, group: Group) -> Row:
    shape = (facts.size("vocab_size"), facts.size("hidden_size"))
    return Row(name, shape, group, Vocabulary(), Vocabulary())
