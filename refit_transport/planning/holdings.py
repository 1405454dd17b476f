"""What each rank of one side holds of each tensor, as few rectangles as possible: the planner's view of a manifest."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from refit_transport.layout.manifest import Manifest, Piece
from refit_transport.layout.region import merge_boxes
from refit_transport.planning.overlap import Boxes

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
    """One side's holdings by tensor name."""

    by_tensor: Mapping[str, Holding]

    @classmethod
    def of(cls, manifest: Manifest, names: Container[str] | None = None) -> Self:
        """Of all the manifest's tensors, or of those named.

        A rank's boxes of a tensor that touch are merged, so that the result doesn't depend on how its buffers cut them
        (16 experts in 16 parameters are one box). Ranks that share one tuple of pieces are looked at once.
        """
        replicas: dict[int, list[int]] = {}
        pieces: dict[int, tuple[Piece, ...]] = {}
        for ranked in manifest.ranks:
            replicas.setdefault(id(ranked.pieces), []).append(ranked.rank)
            pieces[id(ranked.pieces)] = ranked.pieces
        found: dict[str, dict[Corners, list[int]]] = {}
        merged: dict[tuple[Corners, ...], Sequence[Corners]] = {}
        for key, ranks in replicas.items():
            for tensor, boxes in _by_tensor(pieces[key], names).items():
                if boxes not in merged:
                    merged[boxes] = _merge(boxes)
                owners = found.setdefault(tensor, {})
                for box in merged[boxes]:
                    owners.setdefault(box, []).extend(ranks)
        return cls({tensor: _holding(owners) for tensor, owners in found.items()})

    def of_tensor(self, name: str) -> Holding:
        """Empty where the side holds nothing of it."""
        return self.by_tensor.get(name, NOTHING)


def corners_to_array(boxes: Sequence[Corners], dims: int) -> Boxes:
    """Boxes as an int64 array of shape [n, max(dims, 1), 2]."""
    return np.array([box or ((0, 1),) for box in boxes], dtype=np.int64).reshape(-1, max(dims, 1), 2)


def _by_tensor(pieces: Sequence[Piece], names: Container[str] | None) -> dict[str, tuple[Corners, ...]]:
    """The non-empty boxes of each wanted tensor, in the order of the pieces."""
    found: dict[str, list[Corners]] = {}
    for piece in pieces:
        if names is None or piece.tensor in names:
            corners = tuple((span.start, span.stop) for span in piece.box.spans)
            if all(start < stop for start, stop in corners):
                found.setdefault(piece.tensor, []).append(corners)
    return {tensor: tuple(boxes) for tensor, boxes in found.items()}


def _merge(boxes: tuple[Corners, ...]) -> Sequence[Corners]:
    if len(boxes) == 1 or not boxes[0]:
        return boxes[:1]
    merged = merge_boxes(np.array(boxes, dtype=np.int64))
    return [tuple((start, stop) for start, stop in box) for box in merged.tolist()]


def _holding(owners: Mapping[Corners, list[int]]) -> Holding:
    ordered = sorted(owners)
    return Holding(tuple(ordered), tuple(tuple(sorted(set(owners[box]))) for box in ordered))
