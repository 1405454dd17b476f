"""How one tensor dim is divided among the ranks of a mesh axis: the split rule, torch's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Span


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh axis divides this tensor dim."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """torch's `_StridedShard`: the dim is first cut into `split_factor` chunks, and each chunk is divided by the axis.

    A rank holds its share of every chunk, joined. FSDP2 over tensor parallelism is so: the left axis (data) divides
    what the right axis (tensor) has cut, so its split factor is the size of the right axis.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise LayoutError("", -1, "a split factor of at least 1", str(self.split_factor))


@dataclass(frozen=True, slots=True)
class BlockShard:
    """The dim is made of consecutive blocks of these sizes (elements), and each block is divided by the axis.

    A rank holds its share of every block, joined: a fused projection `[q|k|v]`, `[gate|up]` or Mamba's
    `[z|x|B|C|dt]`. The sizes add up to what the axis divides: the whole dim, or what axes left of it have left.
    """

    dim: int
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.blocks):
            raise LayoutError("", -1, "blocks of at least 0 elements", str(list(self.blocks)))

    @classmethod
    def evenly(cls, dim: int, blocks: Iterable[int], *, parts: int, tensor: str = "") -> Self:
        """For engines that cut every block into `parts` equal shares.

        Raises:
            LayoutError: a block that `parts` doesn't divide.

        >>> BlockShard.evenly(0, (8, 8, 2), parts=4)
        Traceback (most recent call last):
        refit_transport.errors.LayoutError: expected blocks that 4 ranks divide, got block 2 of 2 elements
        """
        blocks = tuple(blocks)
        for index, size in enumerate(blocks):
            if size % parts:
                raise LayoutError(tensor, -1, f"blocks that {parts} ranks divide", f"block {index} of {size} elements")
        return cls(dim, blocks)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Ranks hold addends. It can be named, so that a layout that has it is refused with a reason, but not sent."""


Sharding = Shard | StridedShard | BlockShard
Placement = Sharding | Replicate | Partial


def even_split(span: Span, *, parts: int, index: int, tensor: str) -> Span:
    """The equal share of `span` that part `index` of `parts` gets, as engines cut their parameters.

    Raises:
        LayoutError: `parts` doesn't divide the span; names `tensor`.

    >>> even_split(Span(4, 12), parts=2, index=1, tensor="w")
    Span(start=8, stop=12)
    """
    if span.size % parts:
        raise LayoutError(tensor, -1, f"a size that {parts} ranks divide", str(span.size))
    return split(span, parts=parts, index=index)


def split(span: Span, *, parts: int, index: int) -> Span:
    """The share of `span` that part `index` of `parts` gets: `ceil(size / parts)` each, the last ones less or nothing.

    This is `torch.chunk`'s rule, which DTensor, FSDP2 and distributed checkpoints follow.

    >>> [split(Span(0, 10), parts=4, index=i).size for i in range(4)]
    [3, 3, 3, 1]
    >>> [split(Span(0, 3), parts=4, index=i).size for i in range(4)]
    [1, 1, 1, 0]
    """
    if not 0 <= index < parts:
        raise ValueError(f"index must be in 0..{parts - 1} (got {index})")
    chunk = -(-span.size // parts)
    return Span(min(span.start + chunk * index, span.stop), min(span.start + chunk * (index + 1), span.stop))


def shares(placement: Sharding, size: int, *, parts: int, index: int) -> tuple[Span, ...]:
    """What part `index` of `parts` gets of `size` elements: intervals in the order in which it keeps them.

    Intervals without elements are left out.

    >>> shares(StridedShard(0, 2), 9, parts=4, index=1)
    (Span(start=2, stop=4), Span(start=6, stop=7))
    >>> shares(BlockShard(0, (4, 2)), 6, parts=2, index=1)
    (Span(start=2, stop=4), Span(start=5, stop=6))

    Raises:
        LayoutError: blocks that don't add up to `size`.
    """
    if isinstance(placement, BlockShard):
        ends = tuple(accumulate(placement.blocks, initial=0))
        if ends[-1] != size:
            raise LayoutError("", -1, f"blocks of {size} elements in all in dim {placement.dim}", str(ends[-1]))
        blocks = [Span(start, stop) for start, stop in pairwise(ends)]
    elif isinstance(placement, StridedShard):
        factor = placement.split_factor
        blocks = [split(Span(0, size), parts=factor, index=chunk) for chunk in range(min(factor, size))]
    else:
        blocks = [Span(0, size)]
    found = (split(block, parts=parts, index=index) for block in blocks)
    return tuple(share for share in found if share.size)
