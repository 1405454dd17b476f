"""Random layouts arrive byte-exact through the loopback fabric; plans and schedules prove themselves."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refit_transport.errors import PlanError
from refit_transport.fabrics.loopback import run_all
from refit_transport.fabrics.program import SlotPool, lower
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.plan import Holdings, TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Legs, Schedule
from refit_transport.scheduling.scheduler import Passes, build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import manifest_pairs

BUCKETS = st.sampled_from((1, 7, 64, 4096))
PASSES = st.builds(Passes, local=st.booleans(), deduplicate=st.booleans(), balance=st.booleans())


@st.composite
def topologies(draw, pair):
    ranks = [ranked.rank for side in pair for ranked in side.ranks]
    count = draw(st.integers(1, 3))
    homes = [draw(st.integers(0, count - 1)) for _ in ranks]
    return Topology.of([r for r, home in zip(ranks, homes, strict=True) if home == domain] for domain in range(count))


@st.composite
def cases(draw):
    pair = draw(manifest_pairs())
    return pair, draw(topologies(pair)), draw(BUCKETS), draw(PASSES)


@settings(deadline=None)
@given(cases(), st.integers(0, 1 << 12))
def test_every_target_piece_equals_the_oracle(case, staging):
    (source, target), topology, bucket, passes = case
    plan = plan_transfer(source, target)
    plan.check(source, target)
    schedule = build_schedule(plan, topology, bucket_bytes=bucket, passes=passes)
    schedule.check(source, target)
    tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in source.tensors}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target)
    ranks = held.bindings.keys() | wanted.bindings.keys()
    run_all(
        lower(
            schedule,
            r,
            source=held.bindings.get(r),
            target=wanted.bindings.get(r),
            pool=SlotPool([schedule], staging_bytes=staging),
        )
        for r in ranks
    )
    assert wanted.differences(tensors) == []


@settings(deadline=None)
@given(cases())
def test_digests_are_the_same_under_shuffled_input(case):
    (source, target), topology, bucket, passes = case
    shuffled = []
    for side in (source, target):
        ranks = list(side.ranks)
        random.Random(7).shuffle(ranks)
        shuffled.append(Manifest.of(ranks))
    plans = [plan_transfer(source, target), plan_transfer(*shuffled)]
    assert plans[0].digest() == plans[1].digest()
    schedules = [build_schedule(plan, topology, bucket_bytes=bucket, passes=passes) for plan in plans]
    assert schedules[0].digest() == schedules[1].digest()


def without_wanter(plan: TransferPlan, row: int) -> TransferPlan:
    w = plan.wanters
    start = w.start - (np.arange(len(w.start)) > np.searchsorted(w.start, row, side="right") - 1)
    return dataclasses.replace(plan, wanters=Holdings(start, np.delete(w.rank, row), np.delete(w.piece, row)))


@settings(deadline=None)
@given(cases(), st.data())
def test_a_dropped_or_doubled_plan_row_is_found(case, data):
    (source, target), _, _, _ = case
    plan = plan_transfer(source, target)
    assume(len(plan))
    row = data.draw(st.integers(0, len(plan.wanters.rank) - 1))
    with pytest.raises(PlanError):
        without_wanter(plan, row).check(source, target)
    atom = data.draw(st.integers(0, len(plan) - 1))
    rows = np.append(np.arange(len(plan)), atom)
    doubled = TransferPlan(
        plan.tensors, plan.tensor[rows], plan.lo[rows], plan.hi[rows], plan.holders.take(rows), plan.wanters.take(rows)
    )
    with pytest.raises(PlanError, match="twice"):
        doubled.check(source, target)


@settings(deadline=None)
@given(cases(), st.data())
def test_a_dropped_or_doubled_leg_is_found(case, data):
    (source, target), topology, bucket, passes = case
    schedule = build_schedule(plan_transfer(source, target), topology, bucket_bytes=bucket, passes=passes)
    count = len(schedule.legs.parcel)
    assume(count)
    leg = data.draw(st.integers(0, count - 1))
    for rows in (np.delete(np.arange(count), leg), np.sort(np.append(np.arange(count), leg))):
        legs = Legs(*(getattr(schedule.legs, name)[rows] for name in Legs.__slots__))
        with pytest.raises(PlanError):
            Schedule(schedule.parcels, legs, schedule.messages).check(source, target)


def test_an_element_delivered_twice_does_not_make_up_for_a_missing_one():
    rows = Layout((4, 2), Mesh.of(tp=2), (Shard(0),))
    source = manifest_from_layouts("source", {"w": rows}, dtype="uint8")
    target = manifest_from_layouts(
        "target", {"w": Layout((4, 2), Mesh.of(first_rank=2, dp=1), (Replicate(),))}, dtype="uint8"
    )
    plan = plan_transfer(source, target)
    plan.check(source, target)
    first = np.array([0, 0])
    doubled = dataclasses.replace(plan, lo=plan.lo[first], hi=plan.hi[first], holders=plan.holders.take(first))
    with pytest.raises(PlanError, match="is delivered by nobody"):
        doubled.check(source, target)
