"""Exact intersection of sets of boxes, vectorised.

A set of n boxes of d dims is an int64 array of shape [n, d, 2]: start and stop of each span.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.layout.box import Box

Boxes = npt.NDArray[np.int64]
_BLOCK_CELLS = 1 << 20


def boxes_to_array(boxes: Iterable[Box], dims: int) -> Boxes:
    """The boxes as one array of shape [n, max(dims, 1), 2]: a 0-D tensor counts as 1-D of one element."""
    rows = [[(span.start, span.stop) for span in box.spans] or [(0, 1)] for box in boxes]
    return np.array(rows, dtype=np.int64).reshape(-1, max(dims, 1), 2)


def volumes(boxes: Boxes) -> npt.NDArray[np.int64]:
    """The number of elements of each box, shape [n]."""
    result: npt.NDArray[np.int64] = np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1, dtype=np.int64)
    return result


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The non-empty intersections of two box sets: `boxes[k]` is common to boxes `left[k]` and `right[k]`."""

    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    boxes: Boxes


def intersect(a: Boxes, b: Boxes) -> Overlaps:
    """Every non-empty pairwise intersection, ordered by index in `a`, then in `b`.

    >>> rows = np.array([[[0, 4], [0, 8]], [[4, 8], [0, 8]]])
    >>> columns = np.array([[[0, 8], [0, 2]]])
    >>> intersect(rows, columns).boxes.tolist()
    [[[0, 4], [0, 2]], [[4, 8], [0, 2]]]
    """
    block = max(1, _BLOCK_CELLS // max(1, len(b)))
    found: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Boxes]] = []
    for first in range(0, len(a), block):
        part = a[first : first + block]
        start = np.maximum(part[:, None, :, 0], b[None, :, :, 0])
        stop = np.minimum(part[:, None, :, 1], b[None, :, :, 1])
        left, right = np.nonzero(np.all(start < stop, axis=2))
        found.append((left + first, right, np.stack((start[left, right], stop[left, right]), axis=2)))
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return Overlaps(none, none, np.zeros((0, a.shape[1], 2), dtype=np.int64))
    return Overlaps(*(np.concatenate([row[i] for row in found]) for i in range(3)))


def are_disjoint(boxes: Boxes) -> bool:
    """Whether no element is in two of the boxes."""
    pairs = intersect(boxes, boxes)
    return len(pairs.left) == int(np.count_nonzero(volumes(boxes)))


def atoms_of(boxes: Boxes) -> Boxes:
    """Disjoint boxes that cover exactly what `boxes` covers, each wholly inside or wholly outside of every one of them.

    >>> atoms_of(np.array([[[0, 6]], [[4, 8]]])).tolist()
    [[[0, 4]], [[4, 6]], [[6, 8]]]
    """
    distinct = np.unique(boxes[volumes(boxes) > 0], axis=0) if len(boxes) else boxes
    if are_disjoint(distinct):
        return distinct
    cells = np.zeros((1, 0, 2), dtype=np.int64)
    for dim in range(distinct.shape[1]):
        cuts = np.unique(distinct[:, dim, :])
        spans = np.stack((cuts[:-1], cuts[1:]), axis=1)
        cells = np.concatenate(
            (np.repeat(cells, len(spans), axis=0), np.tile(spans, (len(cells), 1))[:, None, :]), axis=1
        )
    return cells[inside(cells, distinct).any(axis=1)]


def inside(a: Boxes, b: Boxes) -> npt.NDArray[np.bool_]:
    """Whether box i of `a` lies wholly in box j of `b`, shape [len(a), len(b)]."""
    lower = a[:, None, :, 0] >= b[None, :, :, 0]
    upper = a[:, None, :, 1] <= b[None, :, :, 1]
    result: npt.NDArray[np.bool_] = np.all(lower & upper, axis=2)
    return result


def uncovered(box: Boxes, cover: Boxes) -> Box | None:
    """Some part of the one box `box` (shape [1, d, 2]) that no box of `cover` reaches, or None."""
    overlap = intersect(box, cover).boxes
    for cell in atoms_of(np.concatenate((box, overlap))):
        if not inside(cell[None], overlap).any():
            return Box.of(*((int(start), int(stop)) for start, stop in cell))
    return None
