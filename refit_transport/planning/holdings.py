"""What each rank of one side holds of each tensor, as few rectangles as possible: the planner's view of a manifest."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from refit_transport.layout.manifest import Manifest, Piece, PieceColumns, RankManifest
from refit_transport.layout.region import merge_boxes
from refit_transport.planning.overlap import Boxes

Ints = npt.NDArray[np.int64]
# A box as plain pairs (start, stop), one per dim: cheap to hash and to sort.
Corners = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """One side's holding of one tensor: distinct boxes in order, and the ranks that hold each, ascending.

    Two tensors that are cut alike over the same ranks have equal holdings; that is what makes a plan small.
    """

    boxes: tuple[Corners, ...]
    ranks: tuple[tuple[int, ...], ...]

    def array(self, dims: int) -> Boxes:
        """The boxes as an array of shape [n, max(dims, 1), 2]; a 0-D tensor counts as 1-D of one element."""
        return corners_to_array(self.boxes, dims)


NOTHING = Holding((), ())


@dataclass(frozen=True, slots=True)
class HoldingIndex:
    """One side's holdings by tensor name; tensors that are held alike have the very same one."""

    by_tensor: Mapping[str, Holding]

    @classmethod
    def of(cls, manifest: Manifest, names: Container[str] | None = None) -> Self:
        """Of all the manifest's tensors, or of those named.

        A rank's boxes of a tensor that touch are merged, so that the result doesn't depend on how its buffers cut them
        (16 experts in 16 parameters are one box). Ranks that share one sequence of pieces are looked at once.
        """
        chosen = [spec.name for spec in manifest.tensors if names is None or spec.name in names]
        replicas: dict[int, list[RankManifest]] = {}
        for ranked in manifest.ranks:
            replicas.setdefault(id(ranked.pieces), []).append(ranked)
        groups = [
            _Group(_columns(same[0].pieces, names), tuple(ranked.rank for ranked in same)) for same in replicas.values()
        ]
        kinds, kind = _kinds(groups, {name: index for index, name in enumerate(chosen)})
        merged: dict[tuple[Corners, ...], Sequence[Corners]] = {}
        distinct: dict[Holding, Holding] = {}
        found: dict[int, Holding] = {}
        for number in np.unique(kind).tolist():
            holding = _holding(kinds, number, groups, merged)
            found[number] = distinct.setdefault(holding, holding)
        held = ((name, found[number]) for name, number in zip(chosen, kind.tolist(), strict=True))
        return cls({name: holding for name, holding in held if holding.boxes})

    def of_tensor(self, name: str) -> Holding:
        """Empty where the side holds nothing of it."""
        return self.by_tensor.get(name, NOTHING)


def corners_to_array(boxes: Sequence[Corners], dims: int) -> Boxes:
    """Boxes as an int64 array of shape [n, max(dims, 1), 2]."""
    return np.array([box or ((0, 1),) for box in boxes], dtype=np.int64).reshape(-1, max(dims, 1), 2)


def _columns(pieces: Sequence[Piece], names: Container[str] | None) -> PieceColumns:
    """The pieces as columns; where columns must be made, only of the named tensors."""
    if names is not None and not isinstance(pieces, PieceColumns):
        pieces = [piece for piece in pieces if piece.tensor in names]
    return PieceColumns.of(pieces)


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that hold the same."""

    pieces: PieceColumns
    ranks: tuple[int, ...]

    def corners(self, boxes: Iterable[int]) -> tuple[Corners, ...]:
        """Those boxes of the pieces that have elements."""
        found = (tuple((s.start, s.stop) for s in self.pieces.boxes[box].spans) for box in boxes)
        return tuple(corners for corners in found if all(start < stop for start, stop in corners))


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a group holds of some tensors (boxes by index), and of what kind they were by the groups before it."""

    before: int
    group: int
    boxes: tuple[int, ...]


def _kinds(groups: Sequence[_Group], index: Mapping[str, int]) -> tuple[list[_Pattern], Ints]:
    """The kind of each tensor, which says what every group holds of it; kind 0, of which nobody holds anything, first.

    Group after group divides the kinds so far by what it holds, so that only distinct kinds cost more than a few
    operations on columns.
    """
    kinds = [_Pattern(0, -1, ())]
    kind = np.zeros(len(index), dtype=np.int64)
    # Groups share names and rows where they only cut differently.
    places: dict[int, Ints] = {}
    patterns: dict[int, _Patterns] = {}
    for number, group in enumerate(groups):
        pieces = group.pieces
        if id(pieces.tensors) not in places:
            places[id(pieces.tensors)] = np.array([index.get(name, -1) for name in pieces.tensors], dtype=np.int64)
        if id(pieces.rows) not in patterns:
            patterns[id(pieces.rows)] = _Patterns.of(pieces)
        held = patterns[id(pieces.rows)]
        place = places[id(pieces.tensors)][held.tensor]
        here, pattern = place[place >= 0], held.pattern[place >= 0]
        found, inverse = np.unique(kind[here] * len(held.boxes) + pattern, return_inverse=True)
        kind[here] = len(kinds) + inverse.reshape(-1)
        for before, which in (divmod(value, len(held.boxes)) for value in found.tolist()):
            kinds.append(_Pattern(before, number, held.boxes[which]))
    return kinds, kind


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The tensors that a group holds, by index, and for each which of the distinct tuples of boxes."""

    tensor: Ints
    pattern: Ints
    boxes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, pieces: PieceColumns) -> Self:
        order = np.argsort(pieces.tensor, kind="stable")
        tensor, first = np.unique(pieces.tensor[order], return_index=True)
        boxes = pieces.box[order].tolist()
        known: dict[tuple[int, ...], int] = {}
        bounds = pairwise([*first.tolist(), len(boxes)])
        pattern = [known.setdefault(tuple(boxes[start:stop]), len(known)) for start, stop in bounds]
        return cls(tensor, np.array(pattern, dtype=np.int64), tuple(known))


def _holding(
    kinds: Sequence[_Pattern], kind: int, groups: Sequence[_Group], merged: dict[tuple[Corners, ...], Sequence[Corners]]
) -> Holding:
    """What all groups hold of a tensor of this kind."""
    owners: dict[Corners, list[int]] = {}
    while kind:
        pattern = kinds[kind]
        boxes = groups[pattern.group].corners(pattern.boxes)
        if boxes not in merged:
            merged[boxes] = _merge(boxes)
        for box in merged[boxes]:
            owners.setdefault(box, []).extend(groups[pattern.group].ranks)
        kind = pattern.before
    ordered = sorted(owners)
    return Holding(tuple(ordered), tuple(tuple(sorted(set(owners[box]))) for box in ordered))


def _merge(boxes: tuple[Corners, ...]) -> Sequence[Corners]:
    if len(boxes) < 2 or not boxes[0]:
        return boxes[:1]
    merged = merge_boxes(np.array(boxes, dtype=np.int64))
    return [tuple((start, stop) for start, stop in box) for box in merged.tolist()]
