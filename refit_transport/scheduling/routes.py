"""The way of a payload: from the rank that packs it, hop by hop, to all ranks that take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """One transmission; `parent` is the index in its route of the hop that brings the payload to `sender`, -1 for none.

    A hop from a rank to itself is a local copy.
    """

    sender: int
    receiver: int
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Route:
    """A tree of hops, parents before children; hops without a parent leave from the root, which packs the payload.

    >>> Route((Hop(0, 4), Hop(4, 5, 0), Hop(0, 8))).root
    0
    """

    hops: tuple[Hop, ...]

    @property
    def root(self) -> int:
        return self.hops[0].sender

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(hop.receiver for hop in self.hops)


@dataclass(frozen=True, slots=True)
class Share:
    """Routes that carry the same bytes, each to other receivers, and how much relative to the flow's other shares."""

    routes: tuple[Route, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class Flow:
    """What happens to some atoms of a plan: all their bytes, one after the other, divided over the shares.

    `atoms` are rows of the plan, ascending.
    """

    atoms: tuple[int, ...]
    shares: tuple[Share, ...]
