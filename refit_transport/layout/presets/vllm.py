"""What the ranks of vLLM engines need of a model, for any supported architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refit_transport.layout.box import Span
from refit_transport.layout.manifest import Manifest, Piece
from refit_transport.layout.parallelism import Misfit, require_fit
from refit_transport.layout.presets.building import (
    Pieces,
    Share,
    by_stage,
    expert_misfits,
    join,
    padded_to,
    width_misfits,
)
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.presets.rows import Group

VOCABULARY_MULTIPLE = 64

# These classes of vLLM 0.32 make what lies outside of the layers on every stage, whether the stage uses it or not.
_VOCABULARY: frozenset[Group] = frozenset({"embedding", "lm_head"})
_ON_EVERY_STAGE: Mapping[str, frozenset[Group]] = {
    "Qwen3MoeForCausalLM": _VOCABULARY | {"norm"},
    "MixtralForCausalLM": _VOCABULARY | {"norm"},
    "GptOssForCausalLM": _VOCABULARY | {"norm"},
    "GemmaForCausalLM": _VOCABULARY | {"norm"},
    "Gemma3ForCausalLM": _VOCABULARY | {"norm"},
    "Gemma3ForConditionalGeneration": _VOCABULARY | {"norm"},
    "NemotronHForCausalLM": _VOCABULARY | {"norm"},
    "Qwen3NextForCausalLM": _VOCABULARY,
    "Qwen3_5MoeForConditionalGeneration": frozenset({"embedding"}),
}


@dataclass(frozen=True, slots=True)
class EngineParallelism:
    """vLLM's parallel sizes: `data` engines of `pipeline` stages, whose dense weights `tensor` ranks hold.

    `expert` 1: each rank of a stage takes a part of every expert. Else `expert` ranks of that stage in a row, of one
    engine or of several, share out whole experts. `partition` has the layers of each stage, as vLLM's variable
    `VLLM_PP_LAYER_PARTITION`; empty: as vLLM spreads them.
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1
    pipeline: int = 1
    partition: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        stages = f", pipeline {self.pipeline}" if self.pipeline > 1 else ""
        return f"tensor {self.tensor}, data {self.data}, expert {self.expert}{stages}"


def stage_layers(layers: int, cut: EngineParallelism) -> tuple[range, ...]:
    """The layers of each stage. What doesn't divide goes to the last stages but one, from behind, one layer each.

    >>> stage_layers(5, EngineParallelism(pipeline=2))
    (range(0, 3), range(3, 5))
    >>> [len(stage) for stage in stage_layers(14, EngineParallelism(pipeline=4))]
    [3, 4, 4, 3]
    >>> stage_layers(5, EngineParallelism(pipeline=2, partition=(1, 4)))
    (range(0, 1), range(1, 5))
    """
    sizes = [*cut.partition] or [layers // cut.pipeline] * cut.pipeline
    for stage in range(2, 2 + layers - sum(sizes)):
        sizes[-stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def target_manifest(
    model: LogicalModel,
    parallelism: EngineParallelism,
    *,
    first_rank: int,
    dtype: str = "bfloat16",
) -> Manifest:
    """The generation side on ranks `first_rank` and up: engine by engine, and in an engine stage by stage.

    Every rank has the regions that `targets.vllm.VllmTarget` describes there, one piece for each rectangle. What a
    trace of the loader alone can know, it can't: tensors that must arrive whole, and layers of a private layout.
    Buffers are symbolic. Replicas share their tuples.

    Raises:
        ConfigError: the model can't be cut so; gives all reasons.

    Two ranks, one key-value head, 250 rows of vocabulary padded to 256:

    >>> config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 250}
    >>> config |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96}
    >>> model = LogicalModel.from_config(config)
    >>> rank = target_manifest(model, EngineParallelism(tensor=2), first_rank=0).ranks[1]
    >>> [str(piece.box) for piece in rank.pieces if piece.tensor.endswith(("lm_head.weight", "k_proj.weight"))]
    ['[0:16, 0:64]', '[128:250, 0:64]']
    """
    cut = parallelism
    require_fit(misfits(model, cut))
    places = [_place(rank, cut) for rank in range(cut.ranks)]
    stages = _stages(model, cut)
    pieces = Pieces({each.name: padded_to(each.row.served, VOCABULARY_MULTIPLE) for each in model.main})
    held = {}
    for place in dict.fromkeys(places):
        found: list[Piece] = []
        for tensor in stages[place.stage]:
            share, experts = _share(tensor, cut, place)
            found += pieces.of(tensor, share, experts)
        held[place] = tuple(found)
    return join("target", places, held, first=first_rank, dtype=dtype, tensors=model.main)


def _stages(model: LogicalModel, cut: EngineParallelism) -> tuple[tuple[LogicalTensor, ...], ...]:
    everywhere = _ON_EVERY_STAGE.get(model.architecture, frozenset())
    kept = [each for each in model.main if each.home != "layer" and each.group in everywhere]
    stages = by_stage(model, stage_layers(model.layers, cut))
    return tuple((*stage, *(each for each in kept if each not in stage)) for stage in stages)


def misfits(model: LogicalModel, cut: EngineParallelism) -> tuple[Misfit, ...]:
    """Every reason why vLLM engines can't serve this model so; empty when they can."""
    found = [Misfit("tensor", cut.tensor, "must be at least 1")] if cut.tensor < 1 else []
    found += [Misfit("expert", cut.expert, "must be at least 1")] if cut.expert < 1 else []
    if cut.pipeline < 1 or cut.pipeline > model.layers:
        found.append(Misfit("pipeline", cut.pipeline, f"must be 1 to {model.layers}, the model's layers"))
    if found:
        return tuple(found)
    if cut.partition and (len(cut.partition), sum(cut.partition)) != (cut.pipeline, model.layers):
        reason = f"must be {cut.pipeline} numbers of layers, {model.layers} together (got {list(cut.partition)})"
        found.append(Misfit("pipeline", cut.pipeline, reason))
    ranks = cut.tensor * cut.data
    if cut.expert > 1 and (cut.expert % cut.tensor or ranks % cut.expert):
        reason = f"must be a multiple of the tensor parallel size {cut.tensor} and divide the {ranks} ranks"
        found.append(Misfit("expert", cut.expert, reason))
    found += expert_misfits(model, expert=cut.expert, uneven="taken")
    expert_tensor = cut.tensor if cut.expert == 1 else 1
    return (*found, *width_misfits(model, "target", tensor=cut.tensor, expert_tensor=expert_tensor))


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's number in its tensor parallel group, among the ranks that share out experts, and its stage."""

    tensor: int
    expert: int
    stage: int


def _place(rank: int, cut: EngineParallelism) -> _Place:
    groups, tensor = divmod(rank, cut.tensor)
    engine, stage = divmod(groups, cut.pipeline)
    return _Place(tensor, (engine * cut.tensor + tensor) % cut.expert, stage)


def _share(tensor: LogicalTensor, cut: EngineParallelism, place: _Place) -> tuple[Share, Span | None]:
    if not tensor.row.experts:
        return Share(cut.tensor, place.tensor), None
    count = tensor.shape[0]
    if cut.expert == 1:
        return Share(cut.tensor, place.tensor), Span(0, count)
    # The first ranks take the remainder, one each.
    each, more = divmod(count, cut.expert)
    start = place.expert * each + min(place.expert, more)
    return Share(1, 0), Span(start, start + each + (place.expert < more))
