"""Fused parameters: several logical tensors stacked along one dim, once or group by group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import Piece
from refit_transport.layout.pieces import merge_pieces


@dataclass(frozen=True, slots=True)
class Part:
    """One logical tensor of a fused parameter: its name and how many elements of the fused dim it has in a group."""

    tensor: str
    size: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """A parameter whose dim `dim` is `groups` equal groups, each of them one slice of every part, in order.

    One group is a plain stack, `[q|k|v]` or `[gate|up]`; with one group per query group it is Megatron's fused QKV.

    Two query groups of two q rows, one k row, one v row; a rank that holds rows 3 to 5 has no k of group 0:

    >>> fusion = Fusion(0, (Part("q", 2), Part("k", 1), Part("v", 1)), groups=2)
    >>> for piece in fusion.unfuse([Piece("qkv", Box.of((3, 6)), "b", 0, (1,))]): print(piece.tensor, piece.box)
    v [0:1]
    q [2:4]
    """

    dim: int
    parts: tuple[Part, ...]
    groups: int = 1

    @property
    def group_size(self) -> int:
        """Elements of the fused dim in one group."""
        return sum(part.size for part in self.parts)

    @property
    def size(self) -> int:
        """Elements of the whole fused dim."""
        return self.groups * self.group_size

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of all consecutive slices, for `BlockShard`.

        >>> Fusion(0, (Part("gate", 4), Part("up", 4))).blocks
        (4, 4)
        """
        return tuple(part.size for part in self.parts) * self.groups

    def shape(self, tensor: str, fused: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one part, given the shape of the whole fused parameter."""
        size = sum(part.size for part in self.parts if part.tensor == tensor) * self.groups
        return (*fused[: self.dim], size, *fused[self.dim + 1 :])

    def unfuse(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """Pieces of the fused tensor as pieces of its parts, merged where the memory allows.

        Raises:
            LayoutError: a piece reaches past the fused dim.
        """
        return merge_pieces(part for piece in pieces for part in self._unfuse(piece))

    def _unfuse(self, piece: Piece) -> Iterable[Piece]:
        held = piece.box.spans[self.dim]
        if held.stop > self.size:
            raise LayoutError(piece.tensor, -1, f"at most {self.size} elements in dim {self.dim}", str(piece.box))
        if held.size == 0:
            return
        for group in range(held.start // self.group_size, -(-held.stop // self.group_size)):
            start = group * self.group_size
            for part in self.parts:
                common = held.intersect(Span(start, start + part.size))
                if common is not None:
                    first = group * part.size + common.start - start
                    yield _renamed(piece, part.tensor, self.dim, common, first)
                start += part.size


def _renamed(piece: Piece, tensor: str, dim: int, held: Span, first: int) -> Piece:
    """The part of a piece with the span `held` of `dim`, as a piece of another tensor that begins at `first` there."""
    spans = list(piece.box.spans)
    spans[dim] = Span(first, first + held.size)
    offset = piece.offset + (held.start - piece.box.spans[dim].start) * piece.strides[dim]
    return replace(piece, tensor=tensor, box=Box(tuple(spans)), offset=offset)
