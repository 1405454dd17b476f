"""Manifests of ranks that are told apart by where they stand: each place is described once, replicas share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from refit_transport.layout.box import Box, Span
from refit_transport.layout.layout import piece_of_its_own
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, Role, TensorSpec
from refit_transport.layout.parallelism import Misfit, Size
from refit_transport.layout.presets.cuts import WHOLE, Cut, Vocabulary
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor

# "as_loaded": a piece for each expert and each block of a fused parameter, as engines keep them. "merged": one for each
# rectangle, whatever parameters it lies in.
Granularity = Literal["as_loaded", "merged"]
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
    granularity: Granularity
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
                boxes = tuple(Box((span, *box.spans[1:])) for span in self._expert_spans(experts) for box in boxes)
            self._boxes[key] = tuple(_merged(boxes)) if self.granularity == "merged" else boxes
        named = (name, *key[1:])
        if named not in self._pieces:
            self._pieces[named] = tuple(piece_of_its_own(name, box) for box in self._boxes[key])
        return self._pieces[named]

    def _expert_spans(self, experts: Span) -> tuple[Span, ...]:
        if self.granularity == "merged":
            return (experts,) if experts.size else ()
        return tuple(Span(number, number + 1) for number in range(experts.start, experts.stop))


def _merged(boxes: Iterable[Box]) -> Iterator[Box]:
    """The same elements; a box that continues the one before it in one dim joins it."""
    last: Box | None = None
    for box in boxes:
        joined = None if last is None else _joined(last, box)
        if joined is None and last is not None:
            yield last
        last = box if joined is None else joined
    if last is not None:
        yield last


def _joined(first: Box, second: Box) -> Box | None:
    differing = [dim for dim, spans in enumerate(zip(first.spans, second.spans, strict=True)) if spans[0] != spans[1]]
    if len(differing) != 1 or first.spans[differing[0]].stop != second.spans[differing[0]].start:
        return None
    spans = list(first.spans)
    spans[differing[0]] = Span(first.spans[differing[0]].start, second.spans[differing[0]].stop)
    return Box(tuple(spans))


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


def width_misfits(model: LogicalModel, role: Role, *, tensor: int, expert_tensor: int) -> Iterator[Misfit]:
    """Every reason why so many ranks can't divide the model's tensors."""
    found: dict[Misfit, None] = {}
    for each in model.main:
        cut = each.row.trained if role == "source" else each.row.served
        size: Size = "expert_tensor" if each.row.experts else "tensor"
        parts = expert_tensor if each.row.experts else tensor
        reason = cut.misfit(parts)
        if reason is not None:
            found[Misfit(size, parts, reason)] = None
    yield from found
