"""Which layouts a native collective can move: against every mesh that it could be told, tried one by one."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import BlockShard, Replicate, Shard
from refit_transport.planning.native import M2N_LIMITS, NativeSide, NativeSplit
from refit_transport.testing.strategies import layouts, manifest_pairs, meshes, shapes


def boxes_of(side: NativeSide, shape):
    """What each rank holds when the collective is told this side: plain arithmetic of rows, columns and parts."""
    held = {}
    for row, column in itertools.product(range(side.mesh[0]), range(side.mesh[1])):
        box = [(0, size) for size in shape]
        for dim, index, parts in zip(side.cuts, (row, column), side.mesh, strict=True):
            if dim is not None:
                box[dim] = (index * shape[dim] // parts, (index + 1) * shape[dim] // parts)
        held[side.first_rank + row * side.mesh[1] + column] = tuple(box)
    return held


def held_by(manifest, name):
    """The boxes of a tensor by rank, as the manifest's pieces say it; ranks without elements left out."""
    found = {}
    for ranked in manifest.ranks:
        boxes = [piece.box for piece in ranked.pieces if piece.tensor == name and piece.box.numel]
        if boxes:
            found[ranked.rank] = [tuple((span.start, span.stop) for span in box.spans) for box in boxes]
    return found


def sides_that_fit(held, shape):
    """Every mesh of one cutting axis over ranks in a row that says exactly what is held."""
    if any(len(boxes) > 1 for boxes in held.values()):
        return []
    ranks, plain = sorted(held), {rank: boxes[0] for rank, boxes in held.items()}
    count, found = len(ranks), []
    for rows in (n for n in range(1, count + 1) if count % n == 0):
        for dim, axis in itertools.product(range(len(shape)), (0, 1)):
            parts = (rows, count // rows)[axis]
            if shape[dim] % parts:
                continue
            local = tuple(size // parts if other == dim else size for other, size in enumerate(shape))
            cuts = (dim, None) if axis == 0 else (None, dim)
            side = NativeSide(ranks[0], (rows, count // rows), cuts, local)
            if boxes_of(side, shape) == plain:
                found.append(side)
    return found


@settings(deadline=None)
@given(manifest_pairs(ranks="any"))
def test_what_is_native_is_told_as_it_is_held_and_everything_else_has_a_reason(pair):
    source, target = pair
    names = [spec.name for spec in target.tensors]
    split = NativeSplit.of(source, target, names)
    native = {tensor.name: tensor for tensor in split.tensors}
    assert sorted([*native, *split.why_not]) == sorted(names)
    assert all(split.why_not.values())
    for name, tensor in native.items():
        for side, manifest in ((tensor.source, source), (tensor.target, target)):
            held = held_by(manifest, name)
            assert {rank: [box] for rank, box in boxes_of(side, tensor.shape).items()} == held
            assert all(tuple(b - a for a, b in boxes[0]) == side.local_shape for boxes in held.values())


@st.composite
def dense_pairs(draw):
    """One tensor of 1 to 3 dims, dense on every rank, in any layout on ranks in any order."""
    shape = draw(shapes(most_dims=3).filter(lambda shape: shape and 0 not in shape))
    here = draw(meshes(pool=range(4), most_ranks=4))
    there = draw(meshes(pool=range(4, 8), most_ranks=4))
    return tuple(
        manifest_from_layouts(role, {"w": draw(layouts(shape, mesh))}, dtype="float32")
        for role, mesh in (("source", here), ("target", there))
    )


@settings(deadline=None, max_examples=300)
@given(dense_pairs())
def test_no_layout_that_fits_is_left_out(pair):
    split = NativeSplit.of(*pair, ("w",))
    shape = pair[1].tensors[0].shape
    fits = [sides_that_fit(held_by(side, "w"), shape) for side in pair]
    dense = all(len(r.pieces) == 1 for side in pair for r in side.ranks if any(p.box.numel for p in r.pieces))
    assert bool(split.tensors) == (bool(fits[0]) and bool(fits[1]) and dense)


def split_of(source, target, *, shape=(8, 8), dtypes=("float32", "float32"), limits=M2N_LIMITS):
    sides = (
        manifest_from_layouts(role, {"w": Layout(shape, mesh, placements)}, dtype=dtype)
        for role, (mesh, placements), dtype in zip(("source", "target"), (source, target), dtypes, strict=True)
    )
    return NativeSplit.of(*sides, ("w",), limits=limits)


TRAIN = (Mesh.of(dp=2, tp=2), (Replicate(), Shard(0)))
SERVE = (Mesh.of(first_rank=4, tp=4), (Shard(1),))


def test_what_the_collective_is_told():
    (tensor,) = split_of(TRAIN, SERVE).tensors
    assert tensor.source == NativeSide(0, (2, 2), (None, 0), (4, 8))
    assert tensor.target == NativeSide(4, (4, 1), (1, None), (8, 2))


def test_whole_copies_are_one_part_on_an_axis_of_one_rank():
    (tensor,) = split_of(TRAIN, (Mesh.of(first_rank=4, dp=3), (Replicate(),))).tensors
    assert tensor.target == NativeSide(4, (3, 1), (None, 0), (8, 8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": (4, 4, 4, 4)}, "it has 4 dims, NCCL M2N moves tensors of 1 to 3"),
        ({"dtypes": ("float32", "bfloat16")}, "it is float32 on the source and bfloat16 on the target"),
        ({"dtypes": ("bool", "bool")}, "NCCL M2N doesn't move bool"),
        ({"shape": (8, 7)}, "the target doesn't cut dim 1 into equal parts that make up the whole"),
        ({"source": (Mesh.of(a=2, b=2), (Shard(0), Shard(1)))}, "the source is cut along dims 0 and 1, NCCL M2N takes"),
        (
            {"source": (Mesh.from_ranks(("a",), (2,), (0, 2)), (Shard(0),))},
            "the source has ranks that are not numbered",
        ),
        (
            {"source": (Mesh.from_ranks(("a",), (2,), (1, 0)), (Shard(0),))},
            "the source has ranks that are not in the or",
        ),
        ({"source": (Mesh.of(a=2), (BlockShard(0, (4, 4)),))}, "the source has ranks that hold several boxes"),
        ({"target": (Mesh.of(first_rank=2, tp=4), (Shard(1),))}, "source and target share ranks"),
        (
            {"limits": replace(M2N_LIMITS, source_shards=1)},
            "2 source shards meet in one target shard, NCCL M2N takes 1",
        ),
        (
            {"limits": replace(M2N_LIMITS, target_shards=3)},
            "one source shard goes to 4 target shards, NCCL M2N takes 3",
        ),
    ],
)
def test_each_limit_has_its_message(change, reason):
    split = split_of(**{"source": TRAIN, "target": SERVE, **change})
    assert split.tensors == ()
    assert any(line.startswith(reason) for line in split.why_not["w"]), split.why_not


def test_shards_of_one_dim_meet_only_where_they_overlap():
    """Rows over 2 to rows over 4: each target shard has one source, each source shard two targets."""
    rows = (Mesh.of(first_rank=4, tp=4), (Shard(0),))
    for limits, fits in (((1, 2), True), ((1, 1), False)):
        few = replace(M2N_LIMITS, source_shards=limits[0], target_shards=limits[1])
        assert bool(split_of(TRAIN, rows, limits=few).tensors) is fits


def test_memory_with_gaps_is_refused_by_name():
    serve = Layout((8, 8), *SERVE)
    source = manifest_from_layouts("source", {"w": Layout((8, 8), *TRAIN)}, dtype="float32")
    dense = manifest_from_layouts("target", {"w": serve}, dtype="float32")
    strided = Manifest.of(
        replace(
            ranked,
            pieces=serve.pieces(ranked.rank, "w", buffer="w", strides=(3, 1)) if ranked.rank == 6 else ranked.pieces,
        )
        for ranked in dense.ranks
    )
    assert NativeSplit.of(source, dense, ("w",)).tensors
    assert NativeSplit.of(source, strided, ("w",)).why_not == {
        "w": ("target rank 6 doesn't hold it as one dense block of memory",)
    }


def test_other_tensors_are_not_looked_at():
    source = manifest_from_layouts("source", {"w": Layout((8, 8), *TRAIN)}, dtype="float32")
    target = manifest_from_layouts("target", {"w": Layout((8, 8), *SERVE)}, dtype="float32")
    split = NativeSplit.of(source, target, ())
    assert (split.tensors, split.why_not) == ((), {})


def test_a_rank_that_the_split_leaves_nothing_is_in_no_mesh():
    """6 columns over 4 ranks are 2, 2, 2 and none."""
    (tensor,) = split_of(TRAIN, SERVE, shape=(8, 6)).tensors
    assert tensor.target.ranks == range(4, 7)
