"""What a plan refuses, naming the tensor and both sides, before any byte moves."""

import dataclasses

import pytest

from refit_transport.errors import LayoutError, PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import check_sides_agree, plan_transfer
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology


def side(role, shape, *, dtype="float32", name="w", first_rank=0):
    layout = Layout(shape, Mesh.of(first_rank=first_rank, tp=2), (Shard(0),))
    return manifest_from_layouts(role, {name: layout}, dtype=dtype)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (side("target", (8, 4), name="v", first_rank=2), "tensor v: rank 2: expected a tensor that the source has"),
        (
            side("target", (8, 5), first_rank=2),
            r"tensor w: .*shape \[8, 4\], got the target's \[8, 5\]",
        ),
        (
            side("target", (8, 4), dtype="int32", first_rank=2),
            "dtype float32, got int32, which it can't become",
        ),
        (side("target", (8, 4), dtype="float8_e4m3fn", first_rank=2), "got float8_e4m3fn"),
    ],
)
def test_sides_that_disagree_are_refused_whatever_the_transport(target, message):
    source = side("source", (8, 4))
    for refuse in (plan_transfer, check_sides_agree):
        with pytest.raises(LayoutError, match=message):
            refuse(source, target)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "uint8"])
def test_equal_dtypes_of_any_kind_are_copied(dtype):
    plan = plan_transfer(side("source", (8, 4), dtype=dtype), side("target", (8, 4), dtype=dtype, first_rank=2))
    assert plan.tensors[0].wire_dtype == dtype


def test_a_hole_in_the_source_is_named_with_its_box():
    spec = TensorSpec("w", (8, 4), "float32")
    piece = Piece("w", Box.of((0, 6), (0, 4)), "w", 0, (4, 1))
    source = Manifest.of([RankManifest(0, "source", (spec,), (piece,))])
    with pytest.raises(PlanError, match=r"tensor w, box \[6:8, 0:4\], target rank 3: no source rank holds it"):
        plan_transfer(source, side("target", (8, 4), first_rank=2))


def test_parcels_that_overlap_in_a_payload_or_leave_it_are_found():
    source = side("source", (8, 4))
    layout = Layout((8, 4), Mesh.of(first_rank=2, dp=1), (Replicate(),))
    target = manifest_from_layouts("target", {"w": layout}, dtype="float32")
    plan = plan_transfer(source, target)
    schedule = build_schedule(plan, Topology.of((range(3),)), bucket_bytes=1 << 10)
    schedule.check(plan)
    moved = dataclasses.replace(schedule.parcels, offset=schedule.parcels.offset + 4)
    with pytest.raises(PlanError, match="the payload's end"):
        dataclasses.replace(schedule, parcels=moved).check(plan)
    less = dataclasses.replace(schedule.payloads, nbytes=schedule.payloads.nbytes - 1)
    with pytest.raises(PlanError, match="declares 63 bytes and has 64"):
        dataclasses.replace(schedule, payloads=less).check(plan)
