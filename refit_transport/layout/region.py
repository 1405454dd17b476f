"""Regions: sets of boxes in a canonical form that doesn't depend on how the region was cut.

A set of n boxes of d dims is an int64 array of shape [n, d, 2]: start and stop of each span.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.int64]


def merge_boxes(boxes: Boxes) -> Boxes:
    """The canonical boxes of the region that `boxes` cover: disjoint, sorted, and few.

    Equal regions give equal arrays, however they were cut, in whatever order, and even where boxes overlap. Boxes
    without elements vanish. The region is cut into bands wherever its cross-section changes, dim after dim; each dim
    is tried as the outermost one, and the attempt with the fewest boxes wins (the first such).

    Experts 3, 4 and 6 of a stacked tensor, one of them in two buffers:

    >>> merge_boxes(np.array([[[4, 5], [0, 8]], [[3, 4], [0, 8]], [[6, 7], [0, 8]], [[3, 4], [0, 8]]])).tolist()
    [[[3, 5], [0, 8]], [[6, 7], [0, 8]]]

    An L keeps its arm in one piece:

    >>> merge_boxes(np.array([[[0, 2], [0, 2]], [[0, 2], [2, 6]], [[2, 4], [0, 2]]])).tolist()
    [[[0, 2], [0, 6]], [[2, 4], [0, 2]]]
    """
    full = boxes[(boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1)]
    if len(full) < 2:
        return full
    varying = np.flatnonzero((full != full[0]).any(axis=(0, 2))).tolist()
    if not varying:
        return full[:1]
    order, bands = varying, _bands(full[:, varying])
    # One box, or boxes along one dim, can't be had with fewer.
    if len(bands) > 1 and len(varying) > 1:
        for outer in varying[1:]:
            other = [outer, *(dim for dim in varying if dim != outer)]
            attempt = _bands(full[:, other])
            if len(attempt) < len(bands):
                order, bands = other, attempt
    merged = np.repeat(full[:1], len(bands), axis=0)
    merged[:, order] = bands
    return merged if order == varying else merged[np.lexsort(merged.reshape(len(merged), -1)[:, ::-1].T)]


def _bands(boxes: Boxes) -> Boxes:
    """The banded form with the dims in this order, outermost first; sorted."""
    if boxes.shape[1] == 1:
        return _intervals(boxes)
    cells = _cells(boxes)
    for dim in reversed(range(cells.shape[1])):
        cells = _join(cells, dim)
    return cells


def _intervals(boxes: Boxes) -> Boxes:
    """The banded form of boxes of one dim."""
    ordered = boxes[np.argsort(boxes[:, 0, 0])]
    start, reach = ordered[:, 0, 0], np.maximum.accumulate(ordered[:, 0, 1])
    first = np.flatnonzero(np.append(True, start[1:] > reach[:-1]))
    last = np.append(first[1:], len(ordered)) - 1
    return np.stack((start[first], reach[last]), axis=1)[:, None]


def _cells(boxes: Boxes) -> Boxes:
    """The region's distinct cells, sorted: cut in each dim wherever a box of the same outer slab begins or ends."""
    slab = np.zeros(len(boxes), dtype=np.int64)
    cells = boxes
    for dim in range(boxes.shape[1]):
        values, codes = np.unique(cells[:, dim], return_inverse=True)
        codes = codes.reshape(-1, 2) + (slab * len(values))[:, None]
        cuts, places = np.unique(codes, return_inverse=True)
        first, last = places.reshape(-1, 2).T
        count = last - first
        ends = np.cumsum(count)
        slab = np.arange(ends[-1]) + np.repeat(first - ends + count, count)
        cells = np.repeat(cells, count, axis=0)
        cells[:, dim, 0], cells[:, dim, 1] = values[cuts[slab] % len(values)], values[cuts[slab + 1] % len(values)]
    return cells[np.unique(slab, return_index=True)[1]]


def _join(cells: Boxes, dim: int) -> Boxes:
    """Joins neighbouring slabs of `dim` in sorted disjoint boxes where their cross-sections (later dims) are equal."""
    new = np.append(True, (cells[1:, : dim + 1] != cells[:-1, : dim + 1]).any(axis=(1, 2)))
    start = np.flatnonzero(new)
    count = np.diff(start, append=len(cells))
    head = cells[start]
    joined = (head[1:, dim, 0] == head[:-1, dim, 1]) & (count[1:] == count[:-1])
    joined &= (head[1:, :dim] == head[:-1, :dim]).all(axis=(1, 2))
    if dim + 1 < cells.shape[1] and joined.any():
        slab = np.cumsum(new) - 1
        row = np.flatnonzero(np.append(joined, False)[slab])
        differs = (cells[row, dim + 1 :] != cells[row + count[slab[row]], dim + 1 :]).any(axis=(1, 2))
        joined[slab[row[differs]]] = False
    kept = np.append(True, ~joined)
    last = np.append(np.flatnonzero(kept)[1:], len(head)) - 1
    result: Boxes = cells[np.repeat(kept, count)]
    result[:, dim, 1] = np.repeat(head[last, dim, 1], count[kept])
    return result
