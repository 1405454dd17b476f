"""Device meshes: which rank stands at which coordinate of which named axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks with named axes; `ranks` lists them in row-major order, in any numbering.

    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> mesh.coordinate(3)
    (1, 1)
    >>> Mesh(("tp",), (2,), (7, 5)).coordinate(5)
    (1,)
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"a mesh needs one distinct name per axis (got {self.axes} for shape {self.shape})")
        if any(size < 1 for size in self.shape) or any(rank < 0 for rank in self.ranks):
            raise ValueError(f"a mesh needs axes of at least 1 and ranks from 0 up (got {self.shape}, {self.ranks})")
        if len(self.ranks) != math.prod(self.shape) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.shape} needs {math.prod(self.shape)} distinct ranks")

    @classmethod
    def of(cls, *, first_rank: int = 0, **axes: int) -> Self:
        """Consecutive ranks from `first_rank`; the last axis varies fastest."""
        count = math.prod(axes.values())
        return cls(tuple(axes), tuple(axes.values()), tuple(range(first_rank, first_rank + count)))

    @classmethod
    def from_ranks(cls, axes: Iterable[str], shape: Iterable[int], ranks: Iterable[int]) -> Self:
        """Any numbering; `ranks` in row-major order."""
        return cls(tuple(axes), tuple(shape), tuple(ranks))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The rank's index on each axis; ValueError when it isn't in the mesh."""
        position, coordinate = self.ranks.index(rank), []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))
