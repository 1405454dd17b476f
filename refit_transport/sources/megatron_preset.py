"""What the ranks of a Megatron policy hold, from the model's and the parallel sizes alone: no process, no megatron."""

from __future__ import annotations

from collections.abc import Iterator

from refit_transport.layout.box import Box, Span
from refit_transport.layout.layout import piece_of_its_own
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
from refit_transport.layout.model_shape import ModelShape
from refit_transport.layout.parallelism import (
    MegatronParallelism,
    MegatronPlace,
    check_parallelism,
    padded_vocab,
    place_of,
    require_fit,
    stage_layers,
)
from refit_transport.layout.placement import even_split
from refit_transport.sources.naming import Placed, Shard, place
from refit_transport.sources.naming_table import TABLE, Row


def megatron_manifest(
    model: ModelShape,
    parallelism: MegatronParallelism,
    *,
    world_size: int,
    dtype: str,
    make_vocab_size_divisible_by: int = 1,
) -> Manifest:
    """The source side that `sources.megatron.MegatronSource` would describe on ranks 0 to `world_size` - 1.

    The same tensors and boxes on every rank; buffers are symbolic: one per piece.

    Raises:
        ConfigError: the model can't be cut so; gives all reasons.
        LayoutError: a fused parameter's rows don't divide.

    >>> model = ModelShape("Qwen3ForCausalLM", 2, 64, 250, 4, 2, 16, 96)
    >>> manifest = megatron_manifest(model, MegatronParallelism(2, pipeline=2), world_size=4, dtype="bfloat16")
    >>> [piece.tensor for piece in manifest.ranks[3].pieces if "layers" not in piece.tensor]
    ['model.norm.weight', 'lm_head.weight']
    >>> next(piece.box for piece in manifest.ranks[3].pieces if "lm_head" in piece.tensor)
    Box.of((125, 250), (0, 64))
    """
    require_fit(check_parallelism(model, parallelism, world_size=world_size))
    vocab = padded_vocab(model.vocab, divisible_by=make_vocab_size_divisible_by, tensor=parallelism.tensor)
    # Ranks that stand at the same place are replicas.
    known: dict[MegatronPlace, tuple[tuple[TensorSpec, ...], tuple[Piece, ...]]] = {}
    ranks = []
    for rank in range(world_size):
        here = place_of(rank, parallelism, world_size=world_size)
        if here not in known:
            held = tuple(_held(model, parallelism, here, vocab))
            specs = {part.tensor: TensorSpec(part.tensor, part.shape, dtype) for part in held}
            known[here] = tuple(specs.values()), tuple(piece_of_its_own(part.tensor, part.box) for part in held)
        ranks.append(RankManifest(rank, "source", *known[here]))
    return Manifest.of(ranks)


def _held(model: ModelShape, cut: MegatronParallelism, here: MegatronPlace, vocab: int) -> Iterator[Placed]:
    """What a rank at this place holds, parameter by parameter."""
    layers = stage_layers(model.layers, cut)[here.stage]
    for row in TABLE:
        for layer in (-1,) if row.scope == "model" else layers:
            if row.exists(model, layer) and (row.scope != "model" or _on_stage(row, model, cut, here.stage)):
                for shard in _shards(row, layer, model, cut, here, vocab):
                    yield from place(shard, model)


def _on_stage(row: Row, model: ModelShape, cut: MegatronParallelism, stage: int) -> bool:
    """Embeddings are on the first stage, and where the head is tied to them again on the last, with all the rest."""
    is_embedding = row.keys[0].startswith("embedding.")
    return (is_embedding and stage == 0) or ((not is_embedding or model.tied) and stage == cut.pipeline - 1)


def _shards(
    row: Row, layer: int, model: ModelShape, cut: MegatronParallelism, here: MegatronPlace, vocab: int
) -> Iterator[Shard]:
    """The shards of one parameter: one per expert, and one per part where each is cut by itself."""
    stacked = row.row_dim == 1
    count, index = (cut.experts_over, here.expert_tensor) if stacked else (cut.tensor, here.tensor)
    key = row.keys[0] if layer < 0 else f"decoder.layers.{layer}.{row.keys[0]}"
    part_rows = [vocab if row.padded else model.size(part.dims[row.row_dim]) for part in row.parts]
    inner = model.dims(row.parts[0].dims[row.row_dim + 1 :])
    outer = (model.experts,) if stacked else ()
    experts = even_split(Span(0, model.experts), parts=cut.expert, index=here.expert, tensor=key)
    rows = [Span(0, sum(part_rows))]
    if row.cut == "each_part":
        starts = [sum(part_rows[:number]) for number in range(len(part_rows))]
        rows = [
            even_split(Span(start, start + size), parts=count, index=index, tensor=key)
            for start, size in zip(starts, part_rows, strict=True)
        ]
    elif row.cut == "rows":
        rows = [even_split(rows[0], parts=count, index=index, tensor=key)]
    rest = [Span(0, size) for size in inner]
    if row.cut == "columns":
        rest[0] = even_split(rest[0], parts=count, index=index, tensor=key)
    for expert in range(experts.start, experts.stop) if stacked else (0,):
        first = (Span(expert, expert + 1),) if stacked else ()
        for span in rows:
            yield Shard(key, (*outer, sum(part_rows), *inner), Box((*first, span, *rest)), row.row_dim)
