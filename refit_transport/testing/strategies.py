"""Hypothesis strategies for layouts and for pairs of manifests over random layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hypothesis import strategies as st

from refit_transport.layout.layout import Layout, manifest_from_layouts, row_major_strides
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, Role
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import BlockShard, Placement, Replicate, Shard, Sharding, StridedShard

DTYPES = ("float32", "bfloat16", "float16", "uint8")
RankSets = Literal["disjoint", "overlapping", "equal", "any"]

# The largest size of a dim by the number of dims: few enough elements that a message per element is still quick.
_LARGEST = (1, 9, 9, 6, 4, 3, 2)


@st.composite
def meshes(draw: st.DrawFn, *, pool: Sequence[int] = range(12), most_ranks: int = 8) -> Mesh:
    """Meshes of 1 to 3 axes and at most `most_ranks` ranks out of `pool`, in any order, with gaps."""
    most_ranks = min(most_ranks, len(pool))
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(1, most_ranks // math.prod(shape)))))
    ranks = draw(st.permutations(pool))[: math.prod(shape)]
    return Mesh.from_ranks(tuple("abc"[: len(shape)]), shape, ranks)


@st.composite
def shapes(draw: st.DrawFn, *, most_dims: int = 6) -> tuple[int, ...]:
    """0 to 6 dims of a few elements each, or of none."""
    dims = draw(st.integers(0, most_dims))
    return tuple(draw(st.integers(0, _LARGEST[dims])) for _ in range(dims))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Any placements of a tensor of this shape on this mesh: strided, in blocks, several axes on one dim included."""
    placements: list[Placement] = []
    for _ in mesh.axes:
        cut = {placement.dim for placement in placements if isinstance(placement, Sharding)}
        placements.append(draw(_placements(shape, cut)))
    return Layout(shape, mesh, tuple(placements))


@st.composite
def _placements(draw: st.DrawFn, shape: tuple[int, ...], cut: set[int]) -> Placement:
    """Blocks only where no axis has cut before: elsewhere their sum depends on the rank."""
    if not shape or draw(st.integers(0, 3)) == 0:
        return Replicate()
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(("shard", "strided", "shard" if dim in cut else "blocks")))
    if kind == "shard":
        return Shard(dim)
    if kind == "strided":
        return StridedShard(dim, draw(st.integers(1, 4)))
    ends = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    return BlockShard(dim, tuple(b - a for a, b in zip([0, *ends], [*ends, shape[dim]], strict=True)))


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Where a local tensor lies in its buffer, in elements."""

    offset: int
    strides: tuple[int, ...]


@st.composite
def local_memories(draw: st.DrawFn, shape: tuple[int, ...]) -> LocalMemory:
    """A local tensor's memory: its dims in any order, with gaps before and between its elements."""
    order = draw(st.permutations(range(len(shape))))
    padded = [max(shape[dim], 1) + draw(st.integers(0, 1)) for dim in order]
    step = draw(st.integers(1, 2))
    strides = dict(zip(order, row_major_strides(padded), strict=True))
    return LocalMemory(draw(st.integers(0, 3)), tuple(step * strides[dim] for dim in range(len(shape))))


@st.composite
def manifest_pairs(draw: st.DrawFn, *, most_ranks: int = 6, ranks: RankSets = "disjoint") -> tuple[Manifest, Manifest]:
    """A source and a target manifest: 1 to 4 tensors of 0 to 6 dims, in any layout and any local memory.

    `ranks` says how the two sides' rank sets meet.
    """
    from_mesh = draw(meshes(pool=range(2 * most_ranks), most_ranks=most_ranks))
    kinds: tuple[RankSets, ...] = ("disjoint", "overlapping", "equal") if ranks == "any" else (ranks,)
    kind = draw(st.sampled_from(kinds))
    to_mesh = draw(_meshes_beside(from_mesh, kind, most_ranks))
    names = [f"layer.{index}.weight" for index in range(draw(st.integers(1, 4)))]
    found = [draw(shapes()) for _ in names]
    here, there = (
        {name: draw(layouts(shape, mesh)) for name, shape in zip(names, found, strict=True)}
        for mesh in (from_mesh, to_mesh)
    )
    return draw(manifests("source", here)), draw(manifests("target", there))


@st.composite
def _meshes_beside(draw: st.DrawFn, mesh: Mesh, kind: RankSets, most_ranks: int) -> Mesh:
    if kind == "equal":
        return Mesh.from_ranks(mesh.axes, mesh.shape, draw(st.permutations(mesh.ranks)))
    others = [rank for rank in range(3 * most_ranks) if rank not in mesh.ranks][:most_ranks]
    if kind == "disjoint":
        return draw(meshes(pool=others, most_ranks=most_ranks))
    found = draw(meshes(pool=[*mesh.ranks, *others], most_ranks=most_ranks))
    shared = draw(st.sampled_from(mesh.ranks))
    return found if shared in found.ranks else replace(found, ranks=(shared, *found.ranks[1:]))


@st.composite
def manifests(draw: st.DrawFn, role: Role, held: Mapping[str, Layout]) -> Manifest:
    """A side whose ranks hold tensors in these layouts, each in a buffer of its own, in any local memory."""
    dense = manifest_from_layouts(role, held, dtype=draw(st.sampled_from(DTYPES[:3])))
    return Manifest.of([draw(_scattered(ranked, held)) for ranked in dense.ranks])


@st.composite
def _scattered(draw: st.DrawFn, ranked: RankManifest, held: Mapping[str, Layout]) -> RankManifest:
    pieces: list[Piece] = []
    for name, layout in held.items():
        if ranked.rank in layout.mesh.ranks:
            memory = draw(local_memories(layout.local_shape(ranked.rank)))
            pieces += layout.pieces(ranked.rank, name, buffer=name, offset=memory.offset, strides=memory.strides)
    return replace(ranked, pieces=tuple(pieces))
