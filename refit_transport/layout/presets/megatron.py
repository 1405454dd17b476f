"""What the ranks of a Megatron policy hold of a model, for any supported architecture."""

from __future__ import annotations

from dataclasses import replace

from refit_transport.layout.box import Span
from refit_transport.layout.manifest import Manifest, Piece
from refit_transport.layout.parallelism import (
    MegatronParallelism,
    MegatronPlace,
    Misfit,
    dense_rank_misfits,
    expert_rank_misfits,
    place_of,
    require_fit,
    sequence_misfits,
    size_misfits,
    stage_layers,
    stage_misfits,
)
from refit_transport.layout.placement import even_split
from refit_transport.layout.presets.building import (
    Pieces,
    Share,
    by_stage,
    expert_misfits,
    expert_training_misfits,
    join,
    module_misfits,
    padded_to,
    width_misfits,
)
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.presets.rows import Spec


def source_manifest(
    model: LogicalModel,
    parallelism: MegatronParallelism,
    *,
    world_size: int,
    dtype: str = "bfloat16",
    first_rank: int = 0,
    make_vocab_size_divisible_by: int = 1,
    spec: Spec = "transformer_engine",
) -> Manifest:
    """The training side on ranks `first_rank` and up, which build layers of this spec.

    Every rank has the regions that `sources.megatron.MegatronSource` describes there, one piece for each rectangle,
    whatever parameters it lies in. Buffers are symbolic. Replicas (data and context parallelism) share their tuples.

    Raises:
        ConfigError: the model can't be cut so; gives all reasons.

    >>> config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 250}
    >>> config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    >>> model = LogicalModel.from_config(config)
    >>> manifest = source_manifest(model, MegatronParallelism(2, pipeline=2), world_size=4)
    >>> [piece.tensor for piece in manifest.ranks[3].pieces if "layers" not in piece.tensor]
    ['model.norm.weight', 'lm_head.weight']
    >>> next(piece.box for piece in manifest.ranks[3].pieces if "lm_head" in piece.tensor)
    Box.of((125, 250), (0, 64))
    """
    require_fit(misfits(model, parallelism, world_size=world_size, spec=spec))
    multiple = make_vocab_size_divisible_by * parallelism.tensor
    pieces = Pieces({each.name: padded_to(each.row.trained_by(spec), multiple) for each in model.main})
    places = [place_of(rank, parallelism, world_size=world_size) for rank in range(world_size)]
    stages = by_stage(model, stage_layers(model.layers, parallelism))
    held = {}
    for place in dict.fromkeys(places):
        found: list[Piece] = []
        for tensor in stages[place.stage]:
            share, experts = _share(tensor, parallelism, place)
            found += pieces.of(tensor, share, experts)
        held[place] = tuple(found)
    return join("source", places, held, first=first_rank, dtype=dtype, tensors=model.main)


def balanced(model: LogicalModel, cut: MegatronParallelism) -> MegatronParallelism:
    """The same sizes; where the layers don't divide, with the shortage taken from the last and the first stage.

    This is what recipes do by hand. 61 layers in 16 stages: 4 each, the first 3, the last 2.

    >>> model = LogicalModel("any", 61, ())
    >>> uneven = balanced(model, MegatronParallelism(pipeline=16))
    >>> uneven.first_stage_layers, uneven.last_stage_layers
    (3, 2)
    """
    chosen = cut.first_stage_layers or cut.last_stage_layers
    if chosen or cut.pipeline < 2 or not model.layers % (cut.pipeline * cut.virtual_pipeline):
        return cut
    share = -(-model.layers // (cut.pipeline * cut.virtual_pipeline)) * cut.virtual_pipeline
    short = share * cut.pipeline - model.layers
    first, last = share - short // 2, share - (short - short // 2)
    return replace(cut, first_stage_layers=first, last_stage_layers=last) if first > 0 and last > 0 else cut


def training_misfits(model: LogicalModel, cut: MegatronParallelism, *, world_size: int) -> tuple[Misfit, ...]:
    """Every reason why this model can't be trained so on this many ranks; empty when it can."""
    found = misfits(model, cut, world_size=world_size)
    if tuple(size_misfits(cut)):
        return found
    return (
        *found,
        *sequence_misfits(tensor=cut.tensor, sequence_parallel=cut.sequence_parallel),
        *expert_training_misfits(model, tensor=cut.tensor, sequence_parallel=cut.sequence_parallel),
        *module_misfits(model, virtual_pipeline=cut.virtual_pipeline, expert_tensor=cut.experts_over),
    )


def misfits(
    model: LogicalModel, cut: MegatronParallelism, *, world_size: int, spec: Spec = "transformer_engine"
) -> tuple[Misfit, ...]:
    """Every reason why so many ranks can't hold the model so; empty when they can."""
    return tuple(size_misfits(cut)) or (
        *dense_rank_misfits(world_size, tensor=cut.tensor, pipeline=cut.pipeline),
        *expert_rank_misfits(world_size, pipeline=cut.pipeline, expert=cut.expert, expert_tensor=cut.experts_over),
        *stage_misfits(
            model,
            pipeline=cut.pipeline,
            virtual_pipeline=cut.virtual_pipeline,
            first_stage_layers=cut.first_stage_layers,
            last_stage_layers=cut.last_stage_layers,
        ),
        *expert_misfits(model, expert=cut.expert, uneven="refused"),
        *width_misfits(model, "source", tensor=cut.tensor, expert_tensor=cut.experts_over, spec=spec),
    )


def _share(tensor: LogicalTensor, cut: MegatronParallelism, place: MegatronPlace) -> tuple[Share, Span | None]:
    if not tensor.row.experts:
        return Share(cut.tensor, place.tensor), None
    every = Span(0, tensor.shape[0])
    experts = even_split(every, parts=cut.expert, index=place.expert, tensor=tensor.name)
    return Share(cut.experts_over, place.expert_tensor), experts
