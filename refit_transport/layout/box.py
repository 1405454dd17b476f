"""Half-open intervals and rectangles of a logical tensor, in global element coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The half-open interval `[start, stop)` of one dim, in elements.

    >>> Span(2, 6).intersect(Span(4, 9))
    Span(start=4, stop=6)
    >>> Span(2, 6).intersect(Span(7, 9)) is None
    True
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop (got {self.start}, {self.stop})")

    @property
    def size(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Span) -> Span | None:
        """The common interval, or None when it would be empty."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """One rectangle of a logical tensor: a span per dim. A 0-D tensor's only box is `Box(())`, of one element.

    >>> box = Box.of((0, 4), (2, 6))
    >>> box.shape, box.numel
    ((4, 4), 16)
    >>> box.intersect(Box.of((3, 8), (0, 3)))
    Box.of((3, 4), (2, 3))
    """

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, *spans: tuple[int, int]) -> Self:
        return cls(tuple(Span(start, stop) for start, stop in spans))

    @classmethod
    def full(cls, shape: Iterable[int]) -> Self:
        """The whole of a tensor with this shape."""
        return cls(tuple(Span(0, size) for size in shape))

    @classmethod
    def at(cls, offset: Iterable[int], shape: Iterable[int]) -> Self:
        """The box that begins at `offset` and has this shape."""
        return cls(tuple(Span(start, start + size) for start, size in zip(offset, shape, strict=True)))

    @property
    def offset(self) -> tuple[int, ...]:
        return tuple([span.start for span in self.spans])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([span.stop - span.start for span in self.spans])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common rectangle, or None when it would be empty."""
        spans = []
        for mine, theirs in zip(self.spans, other.spans, strict=True):
            common = mine.intersect(theirs)
            if common is None:
                return None
            spans.append(common)
        return Box(tuple(spans))

    def minus(self, other: Box) -> list[Box]:
        """What `other` leaves of this box, cut into disjoint boxes.

        >>> [str(rest) for rest in Box.of((0, 4), (0, 4)).minus(Box.of((1, 9), (0, 3)))]
        ['[0:1, 0:4]', '[1:4, 3:4]']
        """
        common = self.intersect(other)
        if common is None:
            return [self]
        rest, spans = [], list(self.spans)
        for dim, (own, cut) in enumerate(zip(self.spans, common.spans, strict=True)):
            for start, stop in ((own.start, cut.start), (cut.stop, own.stop)):
                if start < stop:
                    rest.append(Box((*spans[:dim], Span(start, stop), *spans[dim + 1 :])))
            spans[dim] = cut
        return rest

    def contains(self, other: Box) -> bool:
        return all(
            mine.start <= theirs.start and theirs.stop <= mine.stop
            for mine, theirs in zip(self.spans, other.spans, strict=True)
        )

    def __repr__(self) -> str:
        return f"Box.of({', '.join(f'({span.start}, {span.stop})' for span in self.spans)})"

    def __str__(self) -> str:
        """The rectangle as an index expression, for people: `[0:4, 2:6]`."""
        return f"[{', '.join(f'{span.start}:{span.stop}' for span in self.spans)}]"
