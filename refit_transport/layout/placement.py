"""How one tensor dim is divided among the ranks of a mesh axis: the split rule, torch's own."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Span


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh axis divides this tensor dim."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Ranks hold addends. It can be named, so that a layout that has it is refused with a reason, but not sent."""


Placement = Shard | Replicate | Partial


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
