"""Which elements of a parameter its loader writes, and how often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.box import Box
from refit_transport.targets.loader_trace import Region
from refit_transport.targets.strided import locate


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two regions, by their positions in the sequence given, that share an element."""

    first: int
    second: int


def overlaps(shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[Overlap, ...]:
    """The pairs of regions of one contiguous parameter of this shape that share an element.

    >>> from refit_transport.targets.strided import StridedView
    >>> rows = [Region("w", StridedView(start * 3, (2, 3), (3, 1)), 0) for start in (0, 2, 3)]
    >>> overlaps((5, 3), rows)
    (Overlap(first=1, second=2),)
    """
    boxes = [_box(shape, region) for region in regions]
    known = [(box, index) for index, box in enumerate(boxes) if box is not None]
    # Sweep over the first dim: the many experts of one parameter never meet there.
    known.sort(key=lambda item: item[0].offset)
    found: list[Overlap] = []
    active: list[tuple[Box, int]] = []
    for box, index in known:
        start = box.offset[0] if shape else 0
        active = [other for other in active if not shape or other[0].spans[0].stop > start]
        found += [Overlap(*sorted((other[1], index))) for other in active if box.intersect(other[0]) is not None]
        active.append((box, index))
    for index in (index for index, box in enumerate(boxes) if box is None):
        mask = _mask(shape, [regions[index]])
        found += [
            Overlap(*sorted((index, other)))
            for other in range(len(regions))
            if other != index and (boxes[other] is not None or other > index)
            if bool((mask & _mask(shape, [regions[other]])).any())
        ]
    return tuple(sorted(set(found), key=lambda pair: (pair.first, pair.second)))


def missing(shape: tuple[int, ...], regions: Iterable[Region]) -> int:
    """The number of elements of a contiguous parameter of this shape that no region holds.

    >>> from refit_transport.targets.strided import StridedView
    >>> missing((5, 3), [Region("w", StridedView(0, (4, 2), (3, 1)), 0)])
    7
    """
    regions = tuple(regions)
    boxes = [_box(shape, region) for region in regions]
    if all(box is not None for box in boxes) and not overlaps(shape, regions):
        return math.prod(shape) - sum(box.numel for box in boxes if box is not None)
    return int(math.prod(shape) - np.count_nonzero(_mask(shape, regions)))


def _box(shape: tuple[int, ...], region: Region) -> Box | None:
    located = locate(region.view, shape, (0,) * len(region.view.shape))
    return None if located is None else located.box


def _mask(shape: tuple[int, ...], regions: Iterable[Region]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """True where a region lies; needs a byte per element, so only regions that aren't boxes come here."""
    mask = np.zeros(math.prod(shape), dtype=np.bool_)
    for region in regions:
        view = region.view
        strided = np.lib.stride_tricks.as_strided(mask[view.offset :], view.shape, view.strides)
        strided[...] = True
    return mask
