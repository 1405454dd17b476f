"""Parameters that hold several tensors: rows of the fused parameter <-> rows of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refit_transport.layout.box import Span


@dataclass(frozen=True, slots=True)
class RowRange:
    """`size` rows that lie at row `start` of part number `part` and at row `fused` of the fused parameter."""

    part: int
    start: int
    fused: int
    size: int


def split_rows(part_rows: Sequence[int], *, groups: int, window: Span) -> tuple[RowRange, ...]:
    """Cuts a window of a fused parameter's rows at the borders of its parts; rows past the last block are dropped.

    Two query groups of two q heads, one k and one v head, one row each; the rank holds rows 3 to 6:

    >>> for rows in split_rows((4, 2, 2), groups=2, window=Span(3, 6)):
    ...     print(rows)
    RowRange(part=2, start=0, fused=3, size=1)
    RowRange(part=0, start=2, fused=4, size=2)
    """
    shares = tuple(rows // groups for rows in part_rows)
    block = sum(shares)
    found = []
    for group in range(window.start // block, min(groups, -(-window.stop // block))):
        fused = group * block
        for part, share in enumerate(shares):
            common = window.intersect(Span(fused, fused + share))
            if common is not None:
                found.append(RowRange(part, group * share + common.start - fused, common.start, common.size))
            fused += share
    return tuple(found)
