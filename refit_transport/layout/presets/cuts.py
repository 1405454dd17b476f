"""How a group of ranks divides one tensor: a value per rule, which says each rank's part of the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from refit_transport.layout.box import Box, Span
from refit_transport.layout.fused import split_rows


@dataclass(frozen=True, slots=True)
class Block:
    """`size` elements of a dim in `units` equal units that stay whole, and what a unit is, for messages.

    >>> str(Block(4096, units=32, of="attention heads"))
    '32 attention heads'
    """

    size: int
    units: int
    of: str

    def __str__(self) -> str:
        return f"{self.of} {self.units}" if self.units == self.size else f"{self.units} {self.of}"


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank has the whole tensor."""

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:  # noqa: ARG002
        """The full box."""
        return (Box.full(shape),)

    def misfit(self, parts: int) -> str | None:  # noqa: ARG002
        """None: it fits any number of ranks."""
        return None


@dataclass(frozen=True, slots=True)
class Even:
    """Every block of `dim`, in order, is divided evenly; a rank has its share of each.

    Packed parameters have several blocks, such as Mamba's `in_proj` z | x | B | C | dt.

    >>> packed = Even(0, (Block(8, 4, "heads"), Block(4, 2, "groups")))
    >>> [str(box) for box in packed.boxes((12, 5), parts=2, index=1)]
    ['[4:8, 0:5]', '[10:12, 0:5]']
    >>> packed.misfit(4)
    "must divide the model's 2 groups"
    """

    dim: int
    blocks: tuple[Block, ...]

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:
        """One box per block."""
        spans, start = [], 0
        for block in self.blocks:
            share = block.size // parts
            spans.append(Span(start + index * share, start + (index + 1) * share))
            start += block.size
        return _along(shape, self.dim, spans)

    def misfit(self, parts: int) -> str | None:
        """Why so many ranks can't divide it."""
        return next((f"must divide the model's {block}" for block in self.blocks if block.units % parts), None)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows, padded to a multiple of `multiple`, are divided evenly; padding is no element.

    >>> [str(Vocabulary(64).boxes((250, 4), parts=2, index=index)[0]) for index in range(2)]
    ['[0:128, 0:4]', '[128:250, 0:4]']
    """

    multiple: int = 1

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:
        """The rank's true rows; no box where it has padding only."""
        rows, unit = shape[0], lcm(self.multiple, parts)
        share = -(-rows // unit) * unit // parts
        return _along(shape, 0, [Span(min(index * share, rows), min((index + 1) * share, rows))])

    def misfit(self, parts: int) -> str | None:  # noqa: ARG002
        """None: the padding makes it fit."""
        return None


@dataclass(frozen=True, slots=True)
class KeyValueRows:
    """Rows of key or value heads; ranks that outnumber the heads keep copies, neighbours the same one.

    >>> rows = KeyValueRows(Block(8, 2, "key-value heads"))
    >>> [str(rows.boxes((8,), parts=4, index=index)[0]) for index in range(4)]
    ['[0:4]', '[0:4]', '[4:8]', '[4:8]']
    """

    block: Block

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:
        """One box of whole heads."""
        owners = min(parts, self.block.units)
        share, owner = self.block.size // owners, index * owners // parts
        return _along(shape, 0, [Span(owner * share, (owner + 1) * share)])

    def misfit(self, parts: int) -> str | None:
        """Why so many ranks can't divide it."""
        return _divides_or_multiplies(self.block, parts)


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Part number `part` of a parameter of `groups` blocks, each with its share of every part; its rows are divided.

    Megatron's QKV has a block per query group. Ranks that outnumber the groups cut blocks, so some have no k or v.

    >>> q, k = (FusedRows((4, 2, 2), part, Block(2, 2, "key-value heads")) for part in (0, 1))
    >>> [str(box) for box in q.boxes((4, 9), parts=2, index=1)]
    ['[2:4, 0:9]']
    >>> k.boxes((2, 9), parts=4, index=0)
    ()
    """

    part_rows: tuple[int, ...]
    part: int
    groups: Block

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:
        """The part's rows among the rank's rows of the fused parameter."""
        share = sum(self.part_rows) // parts
        window = Span(index * share, (index + 1) * share)
        rows = split_rows(self.part_rows, groups=self.groups.units, window=window)
        return _along(shape, 0, [Span(row.start, row.start + row.size) for row in rows if row.part == self.part])

    def misfit(self, parts: int) -> str | None:
        """Why so many ranks can't divide it."""
        return _divides_or_multiplies(self.groups, parts)


@dataclass(frozen=True, slots=True)
class FirstRank:
    """Only the first rank has it: a bias that is added once, behind a sum over the ranks."""

    def boxes(self, shape: tuple[int, ...], *, parts: int, index: int) -> tuple[Box, ...]:  # noqa: ARG002
        """The full box on the first rank."""
        return () if index else (Box.full(shape),)

    def misfit(self, parts: int) -> str | None:  # noqa: ARG002
        """None: it fits any number of ranks."""
        return None


Cut = Whole | Even | Vocabulary | KeyValueRows | FusedRows | FirstRank
WHOLE = Whole()


def _divides_or_multiplies(block: Block, parts: int) -> str | None:
    if block.units % parts and parts % block.units:
        return f"must divide, or be a multiple of, the model's {block}"
    return None


def _along(shape: tuple[int, ...], dim: int, spans: list[Span]) -> tuple[Box, ...]:
    """The boxes that have these spans in `dim`; empty ones are dropped."""
    full = Box.full(shape).spans
    return tuple(Box((*full[:dim], span, *full[dim + 1 :])) for span in spans if span.size)
