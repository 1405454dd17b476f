"""A tensor's distribution over a mesh: which boxes each rank holds, and where in its local tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from operator import mul

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, Role, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import BlockShard, Partial, Placement, Sharding, shares
from refit_transport.layout.wire import canonical_json, digest


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the tensor and the box of a rank's local tensor, of the same shape, where it lies."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Global shape (elements), mesh, and one placement per mesh axis, applied left to right as DTensor does.

    A rank's local tensor is dense. Where it joins parts of the tensor that don't touch, the rank holds several boxes:

    >>> from refit_transport.layout.placement import Replicate, Shard
    >>> Layout((8, 8), Mesh.of(tp=4), (Shard(1),)).region(2)
    (Box.of((0, 8), (4, 6)),)
    >>> gate_up = Layout((8, 3), Mesh.of(tp=2), (BlockShard(0, (4, 4)),))
    >>> for held in gate_up.held(1): print(held.box, "lies at", held.local)
    [2:4, 0:3] lies at [0:2, 0:3]
    [6:8, 0:3] lies at [2:4, 0:3]

    Two layouts are equal when every rank holds the same elements in the same order. Names and sizes of mesh axes don't
    matter, nor how a placement is written: on an axis of one rank, `Shard` is `Replicate`.

    >>> Layout((8, 3), Mesh.of(a=1, b=2), (Shard(1), Replicate())) == Layout((8, 3), Mesh.of(dp=2), (Replicate(),))
    True

    `Partial` is refused, because addends aren't the tensor:

    >>> Layout((8,), Mesh.of(tp=2), (Partial(),))
    Traceback (most recent call last):
    refit_transport.errors.LayoutError: expected shards or Replicate on axis tp, got Partial (reduce it first)
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.axes):
            raise LayoutError("", -1, f"{len(self.mesh.axes)} placements", str(len(self.placements)))
        for axis, placement in zip(self.mesh.axes, self.placements, strict=True):
            if isinstance(placement, Partial):
                raise LayoutError("", -1, f"shards or Replicate on axis {axis}", "Partial (reduce it first)")
            if isinstance(placement, Sharding) and not 0 <= placement.dim < len(self.shape):
                raise LayoutError("", -1, f"a dim below {len(self.shape)} on axis {axis}", str(placement))
        for dim in {placement.dim for placement in self.placements if isinstance(placement, BlockShard)}:
            self._check_blocks(dim)

    def _check_blocks(self, dim: int) -> None:
        """Blocks must add up on every rank, however uneven the axes left of theirs cut."""
        sizes = {self.shape[dim]}
        for parts, placement in zip(self.mesh.shape, self.placements, strict=True):
            if isinstance(placement, Sharding) and placement.dim == dim:
                found = (shares(placement, size, parts=parts, index=i) for size in sizes for i in range(parts))
                sizes = {sum(span.size for span in spans) for spans in found}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if (self.shape, self.mesh, self.placements) == (other.shape, other.mesh, other.placements):
            return True
        return self._identity() == other._identity() and self.holdings() == other.holdings()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[tuple[int, ...], frozenset[int]]:
        return self.shape, frozenset(self.mesh.ranks)

    def holdings(self) -> tuple[tuple[LocalBox, ...], ...]:
        """What each rank holds, by rank in ascending order: what makes layouts equal."""
        return tuple(self.held(rank) for rank in sorted(self.mesh.ranks))

    def digest(self) -> str:
        """Equal for equal layouts, on every machine."""
        ranks = sorted(self.mesh.ranks)
        held = [[[str(part.box), str(part.local)] for part in parts] for parts in self.holdings()]
        return digest(canonical_json([self.shape, ranks, held]))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's local tensor; a dim of size 0 when the split leaves it nothing."""
        return tuple(sum(span.size for span in spans) for spans in self._intervals(rank))

    def region(self, rank: int) -> tuple[Box, ...]:
        """The boxes that the rank holds, in the order of its local memory; empty when the split leaves it nothing."""
        return tuple(part.box for part in self.held(rank))

    def held(self, rank: int) -> tuple[LocalBox, ...]:
        """The boxes that the rank holds and where each lies in its local tensor, in the order of its local memory."""
        dims = [list(zip(spans, _placed(spans), strict=True)) for spans in self._intervals(rank)]
        return tuple(
            LocalBox(Box(tuple(span for span, _ in parts)), Box(tuple(local for _, local in parts)))
            for parts in product(*dims)
        )

    def pieces(
        self, rank: int, tensor: str, *, buffer: str, offset: int = 0, strides: tuple[int, ...] | None = None
    ) -> tuple[Piece, ...]:
        """What the rank holds, as pieces of a local tensor at element `offset` of `buffer`; row-major without strides.

        >>> Layout((8, 3), Mesh.of(tp=2), (BlockShard(0, (4, 4)),)).pieces(0, "w", buffer="b", strides=(1, 4))[1]
        Piece(tensor='w', box=Box.of((4, 6), (0, 3)), buffer='b', offset=2, strides=(1, 4))
        """
        steps = row_major_strides(self.local_shape(rank)) if strides is None else strides
        return tuple(
            Piece(tensor, part.box, buffer, offset + sum(map(mul, part.local.offset, steps)), steps)
            for part in self.held(rank)
        )

    def _intervals(self, rank: int) -> list[tuple[Span, ...]]:
        """Per dim, the intervals whose concatenation is the local tensor's dim; neighbours that touch are one."""
        held: list[tuple[Span, ...]] = [(span,) if span.size else () for span in Box.full(self.shape).spans]
        for index, parts, placement in zip(self.mesh.coordinate(rank), self.mesh.shape, self.placements, strict=True):
            if isinstance(placement, Sharding):
                before = held[placement.dim]
                size = sum(span.size for span in before)
                held[placement.dim] = _select(before, shares(placement, size, parts=parts, index=index))
        return held


def _placed(spans: Iterable[Span]) -> list[Span]:
    """Where each interval lies in the concatenation of all."""
    ends = accumulate((span.size for span in spans), initial=0)
    return [Span(start, stop) for start, stop in pairwise(ends)]


def _select(spans: tuple[Span, ...], chosen: Iterable[Span]) -> tuple[Span, ...]:
    """The parts of a concatenation of intervals that lie in the chosen intervals of it, in order, joined if touching.

    >>> _select((Span(0, 4), Span(8, 12)), [Span(2, 6)])
    (Span(start=2, stop=4), Span(start=8, stop=10))
    """
    found: list[Span] = []
    pairs = list(zip(spans, _placed(spans), strict=True))
    for choice in chosen:
        for span, place in pairs:
            common = place.intersect(choice)
            if common is None:
                continue
            shift = span.start - place.start
            part = Span(common.start + shift, common.stop + shift)
            if found and found[-1].stop == part.start:
                part = Span(found.pop().start, part.stop)
            found.append(part)
    return tuple(found)


def row_major_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor.

    >>> row_major_strides((2, 3, 5))
    (15, 5, 1)
    """
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def piece_of_its_own(tensor: str, box: Box) -> Piece:
    """A piece that is the whole of a contiguous buffer, named after the box: for sides that no process holds yet."""
    return Piece(tensor, box, f"{tensor}{box}", 0, row_major_strides(box.shape))


def manifest_from_layouts(role: Role, layouts: Mapping[str, Layout], *, dtype: str) -> Manifest:
    """A side whose ranks hold each tensor's local part as one contiguous buffer of the same name."""
    pieces: dict[int, list[Piece]] = {rank: [] for layout in layouts.values() for rank in layout.mesh.ranks}
    for name, layout in layouts.items():
        for rank in layout.mesh.ranks:
            pieces[rank] += layout.pieces(rank, name, buffer=name)
    specs = {name: TensorSpec(name, layout.shape, dtype) for name, layout in layouts.items()}
    return Manifest.of(
        RankManifest(
            rank,
            role,
            tuple(spec for name, spec in specs.items() if rank in layouts[name].mesh.ranks),
            tuple(pieces[rank]),
        )
        for rank in pieces
    )
