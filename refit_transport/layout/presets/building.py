"""Manifests of ranks that are told apart by where they stand: each place is described once, replicas share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from refit_transport.layout.box import Box, Span
from refit_transport.layout.layout import piece_of_its_own
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, Role, TensorSpec
from refit_transport.layout.parallelism import Misfit, Size
from refit_transport.layout.presets.cuts import WHOLE, Cut, Vocabulary
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.presets.rows import Spec
from refit_transport.layout.region import merge_boxes

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Share:
    """Part `index` of `parts` equal ones."""

    parts: int
    index: int


@dataclass(slots=True)
class Pieces:
    """The pieces of tensors by share: ranks that hold the same box share the very same piece.

    `cuts` has each tensor's cut. Layers repeat, so boxes are worked out once for each kind of tensor.
    """

    cuts: Mapping[str, Cut]
    _kinds: dict[Hashable, int] = field(default_factory=dict)
    _kind_of: dict[str, int] = field(default_factory=dict)
    _boxes: dict[Hashable, tuple[Box, ...]] = field(default_factory=dict)
    _pieces: dict[Hashable, tuple[Piece, ...]] = field(default_factory=dict)

    def of(self, tensor: LogicalTensor, share: Share, experts: Span | None) -> tuple[Piece, ...]:
        """A rank's pieces of a tensor; `experts` are the experts it has, None where dim 0 counts none."""
        name, cut = tensor.name, self.cuts[tensor.name]
        if name not in self._kind_of:
            self._kind_of[name] = self._kinds.setdefault((tensor.shape, cut), len(self._kinds))
        key = (self._kind_of[name], Share(1, 0) if cut is WHOLE else share, experts)
        if key not in self._boxes:
            boxes = cut.boxes(tensor.shape, parts=share.parts, index=share.index)
            if experts is not None:
                boxes = tuple(Box((experts, *box.spans[1:])) for box in boxes if experts.size)
            self._boxes[key] = boxes if len(boxes) < 2 else _merged(boxes)
        named = (name, *key[1:])
        if named not in self._pieces:
            self._pieces[named] = tuple(piece_of_its_own(name, box) for box in self._boxes[key])
        return self._pieces[named]


def _merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements in as few boxes as can be."""
    corners = np.array([[(span.start, span.stop) for span in box.spans] for box in boxes], dtype=np.int64)
    return tuple(Box.of(*((start, stop) for start, stop in box)) for box in merge_boxes(corners).tolist())


def padded_to(cut: Cut, multiple: int) -> Cut:
    """The same cut; of a vocabulary, with this side's padding."""
    return replace(cut, multiple=multiple) if isinstance(cut, Vocabulary) else cut


def join(
    role: Role,
    places: Sequence[Place],
    held: Mapping[Place, tuple[Piece, ...]],
    *,
    first: int,
    dtype: str,
    tensors: Iterable[LogicalTensor],
) -> Manifest:
    """The manifest of ranks counted from `first`, each at its place."""
    specs = {tensor.name: TensorSpec(tensor.name, tensor.shape, dtype) for tensor in tensors}
    known: dict[Place, RankManifest] = {}
    ranks = []
    for rank, place in enumerate(places, first):
        if place not in known:
            names = dict.fromkeys(piece.tensor for piece in held[place])
            known[place] = RankManifest(rank, role, tuple(specs[name] for name in names), held[place])
        ranks.append(known[place].replica(rank))
    return Manifest.of(ranks)


def by_stage(model: LogicalModel, stages: Sequence[Iterable[int]]) -> tuple[tuple[LogicalTensor, ...], ...]:
    """The tensors of each pipeline stage, which has these layers; tied embeddings are on both ends."""
    held: list[list[LogicalTensor]] = [[] for _ in stages]
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    ends = {"first": (0,), "last": (len(stages) - 1,), "ends": (0, len(stages) - 1)}
    for tensor in model.main:
        for stage in (stage_of[tensor.layer],) if tensor.home == "layer" else dict.fromkeys(ends[tensor.home]):
            held[stage].append(tensor)
    return tuple(map(tuple, held))


def expert_misfits(model: LogicalModel, *, expert: int, uneven: Literal["refused", "taken"]) -> Iterator[Misfit]:
    """Only experts can be spread; Megatron gives every rank as many, vLLM doesn't need that."""
    counts = {tensor.shape[0] for tensor in model.main if tensor.row.experts}
    if not counts and expert > 1:
        yield Misfit("expert", expert, "must be 1, because the model has no experts")
    for count in sorted(counts):
        if uneven == "refused" and count % expert:
            yield Misfit("expert", expert, f"must divide the model's {count} experts")
        elif count < expert:
            yield Misfit("expert", expert, f"leaves ranks without experts: the model has {count}")


def expert_training_misfits(model: LogicalModel, *, tensor: int, sequence_parallel: bool) -> Iterator[Misfit]:
    """Megatron's own condition."""
    if model.experts and tensor > 1 and not sequence_parallel:
        reason = "must be true: Megatron trains experts under tensor parallelism only with sequence parallelism"
        yield Misfit("sequence_parallel", sequence_parallel, reason)


def module_misfits(model: LogicalModel, *, virtual_pipeline: int, expert_tensor: int) -> Iterator[Misfit]:
    """What Megatron's modules of some models can't do."""
    if virtual_pipeline > 1 and any(".mixer." in tensor.name for tensor in model.main):
        reason = "must be 1: Megatron gives a rank one chunk of a hybrid model"
        yield Misfit("virtual_pipeline", virtual_pipeline, reason)
    if expert_tensor > 1 and any(tensor.row.experts and tensor.name.endswith("bias") for tensor in model.main):
        yield Misfit("expert_tensor", expert_tensor, "must be 1: Megatron doesn't cut experts that have biases")


def width_misfits(
    model: LogicalModel, role: Role, *, tensor: int, expert_tensor: int, spec: Spec = "transformer_engine"
) -> Iterator[Misfit]:
    """Every reason why so many ranks can't divide the model's tensors."""
    yield from dense_width_misfits(model, role, tensor=tensor, spec=spec)
    yield from expert_width_misfits(model, role, expert_tensor=expert_tensor)


def dense_width_misfits(
    model: LogicalModel, role: Role, *, tensor: int, spec: Spec = "transformer_engine"
) -> Iterator[Misfit]:
    """Tensor parallelism divides heads and the widths of everything but experts."""
    return _width_misfits([each for each in model.main if not each.row.experts], role, "tensor", tensor, spec)


def expert_width_misfits(model: LogicalModel, role: Role, *, expert_tensor: int) -> Iterator[Misfit]:
    """Ranks that each take a part of every expert get equal parts."""
    return _width_misfits([each for each in model.main if each.row.experts], role, "expert_tensor", expert_tensor)


def _width_misfits(
    tensors: Iterable[LogicalTensor], role: Role, size: Size, parts: int, spec: Spec = "transformer_engine"
) -> Iterator[Misfit]:
    cuts = dict.fromkeys(each.row.trained_by(spec) if role == "source" else each.row.served for each in tensors)
    reasons = dict.fromkeys(cut.misfit(parts) for cut in cuts)
    return (Misfit(size, parts, reason) for reason in reasons if reason is not None)
