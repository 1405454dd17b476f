"""Hypothesis strategies for layouts and for pairs of manifests over random layouts."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Placement, Replicate, Shard

DTYPES = ("float32", "bfloat16", "float16", "uint8")


@st.composite
def meshes(draw: st.DrawFn, *, first_rank: int = 0, most_ranks: int = 8) -> Mesh:
    """Meshes of 1 to 3 axes, with permuted rank numbers from `first_rank` up."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(1, most_ranks // math.prod(shape)))))
    ranks = draw(st.permutations(range(first_rank, first_rank + math.prod(shape))))
    return Mesh.from_ranks(tuple("abc"[: len(shape)]), shape, ranks)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Any placements of a tensor of this shape on this mesh, several axes on one dim included."""
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return Layout(shape, mesh, tuple(draw(st.sampled_from(choices)) for _ in mesh.axes))


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """0 to 4 dims, few enough elements that a message per element is still quick."""
    dims = draw(st.integers(0, 4))
    return tuple(draw(st.integers(0, (1, 9, 9, 6, 4)[dims])) for _ in range(dims))


@st.composite
def manifest_pairs(draw: st.DrawFn, *, most_ranks: int = 6) -> tuple[Manifest, Manifest]:
    """A source and a target manifest on disjoint rank sets: 1 to 4 tensors of 0 to 4 dims, even and uneven."""
    from_mesh = draw(meshes(most_ranks=most_ranks))
    to_mesh = draw(meshes(first_rank=len(from_mesh.ranks), most_ranks=most_ranks))
    shapes = draw(st.lists(_shapes(), min_size=1, max_size=4))
    dtypes = draw(st.tuples(st.sampled_from(DTYPES[:3]), st.sampled_from(DTYPES[:3])))
    names = [f"layer.{index}.weight" for index in range(len(shapes))]
    here, there = (
        {name: draw(layouts(shape, mesh)) for name, shape in zip(names, shapes, strict=True)}
        for mesh in (from_mesh, to_mesh)
    )
    return (
        manifest_from_layouts("source", here, dtype=dtypes[0]),
        manifest_from_layouts("target", there, dtype=dtypes[1]),
    )
