"""Vision towers, which a refit of the language model leaves out: rows, so that totals are right."""

from __future__ import annotations

from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.rows import Row, Rows, under, whole


def qwen_vision(facts: Facts) -> Rows:
    """Qwen3.5's tower and merger."""
    hidden, inner = facts.size("hidden_size"), facts.size("intermediate_size")
    patch, frames = facts.size("patch_size"), facts.size("temporal_patch_size")
    rows = _linear("patch_embed.proj", (hidden, facts.size("in_channels"), frames, patch, patch))
    rows.append(whole("pos_embed.weight", (facts.size("num_position_embeddings"), hidden), "other"))
    for number in range(facts.size("depth")):
        block = [*_norm("norm1", hidden), *_norm("norm2", hidden)]
        block += [*_linear("attn.qkv", (3 * hidden, hidden)), *_linear("attn.proj", (hidden, hidden))]
        block += [*_linear("mlp.linear_fc1", (inner, hidden)), *_linear("mlp.linear_fc2", (hidden, inner))]
        rows += under(f"blocks.{number}.", *block)
    merged = hidden * facts.size("spatial_merge_size") ** 2
    rows += [*_norm("merger.norm", hidden), *_linear("merger.linear_fc1", (merged, merged))]
    rows += _linear("merger.linear_fc2", (facts.size("out_hidden_size"), merged))
    return under("model.visual.", *rows)


def gemma_vision(facts: Facts, *, hidden: int) -> Rows:
    """Gemma 3's SigLIP tower and projector."""
    size, inner, patch = facts.size("hidden_size"), facts.size("intermediate_size"), facts.size("patch_size")
    positions = (facts.size("image_size") // patch) ** 2
    rows = _linear("embeddings.patch_embedding", (size, facts.size("num_channels", default=3), patch, patch))
    rows.append(whole("embeddings.position_embedding.weight", (positions, size), "other"))
    for number in range(facts.size("num_hidden_layers")):
        block = [row for name in "kvq" for row in _linear(f"self_attn.{name}_proj", (size, size))]
        block += [*_linear("self_attn.out_proj", (size, size)), *_norm("layer_norm1", size)]
        block += [*_norm("layer_norm2", size), *_linear("mlp.fc1", (inner, size)), *_linear("mlp.fc2", (size, inner))]
        rows += under(f"encoder.layers.{number}.", *block)
    rows += _norm("post_layernorm", size)
    projector = (
        whole("multi_modal_projector.mm_input_projection_weight", (size, hidden), "other"),
        whole("multi_modal_projector.mm_soft_emb_norm.weight", (size,), "other"),
    )
    return (*under("vision_tower.vision_model.", *rows), *projector)


def _linear(name: str, shape: tuple[int, ...]) -> list[Row]:
    return [whole(f"{name}.weight", shape, "other"), whole(f"{name}.bias", shape[:1], "other")]


def _norm(name: str, size: int) -> list[Row]:
    return _linear(name, (size,))
