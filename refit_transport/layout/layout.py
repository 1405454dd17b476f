"""A tensor's distribution over a mesh: which box each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, Role, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Partial, Placement, Shard, split


@dataclass(frozen=True, slots=True)
class Layout:
    """Global shape (elements), mesh, and one placement per mesh axis, applied left to right as DTensor does.

    >>> layout = Layout((8, 8), Mesh.of(tp=4), (Shard(1),))
    >>> layout.box(2)
    Box.of((0, 8), (4, 6))

    `Partial` is refused, because addends aren't the tensor:

    >>> Layout((8,), Mesh.of(tp=2), (Partial(),))
    Traceback (most recent call last):
    refit_transport.errors.LayoutError: expected Shard or Replicate on axis tp, got Partial (reduce it first)
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.axes):
            raise LayoutError("", -1, f"{len(self.mesh.axes)} placements", str(len(self.placements)))
        for axis, placement in zip(self.mesh.axes, self.placements, strict=True):
            if isinstance(placement, Partial):
                raise LayoutError("", -1, f"Shard or Replicate on axis {axis}", "Partial (reduce it first)")
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(self.shape):
                raise LayoutError("", -1, f"a dim below {len(self.shape)} on axis {axis}", f"Shard({placement.dim})")

    def box(self, rank: int) -> Box:
        """The rank's box, of zero elements when the split leaves it nothing."""
        spans = list(Box.full(self.shape).spans)
        for index, size, placement in zip(self.mesh.coordinate(rank), self.mesh.shape, self.placements, strict=True):
            if isinstance(placement, Shard):
                spans[placement.dim] = split(spans[placement.dim], parts=size, index=index)
        return Box(tuple(spans))


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
    """A side whose ranks hold each tensor as one contiguous buffer of the same name, shaped like its box."""
    pieces: dict[int, list[Piece]] = {rank: [] for layout in layouts.values() for rank in layout.mesh.ranks}
    for name, layout in layouts.items():
        for rank in layout.mesh.ranks:
            box = layout.box(rank)
            if box.numel:
                pieces[rank].append(Piece(name, box, name, 0, row_major_strides(box.shape)))
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
