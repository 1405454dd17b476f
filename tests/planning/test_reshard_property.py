"""Random layouts arrive byte-exact through the loopback fabric; plans and schedules prove themselves."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refit_transport.errors import PlanError
from refit_transport.fabrics.loopback import run_all
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.plan import TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Hops, Schedule
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import manifest_pairs

BUCKETS = st.sampled_from((1, 7, 64, 4096))
DISABLED = st.sets(st.sampled_from(PASSES)).map(lambda names: tuple(sorted(names)))


@st.composite
def topologies(draw, pair):
    ranks = [ranked.rank for side in pair for ranked in side.ranks]
    ranks = sorted(set(ranks))
    count = draw(st.integers(1, 3))
    homes = [draw(st.integers(0, count - 1)) for _ in ranks]
    domains = ([r for r, home in zip(ranks, homes, strict=True) if home == domain] for domain in range(count))
    return Topology.of(domains, nics=draw(st.sampled_from(("domain", "rank"))))


@st.composite
def cases(draw):
    pair = draw(manifest_pairs())
    return pair, draw(topologies(pair)), draw(BUCKETS), draw(DISABLED)


@settings(deadline=None)
@given(cases(), st.integers(0, 1 << 12))
def test_every_target_piece_equals_the_oracle(case, staging):
    (source, target), topology, bucket, disabled = case
    plan = plan_transfer(source, target)
    plan.check(source, target)
    schedule = build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled)
    schedule.check(plan)
    tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in source.tensors}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target)
    ranks = held.bindings.keys() | wanted.bindings.keys()
    sizes = SlotSizes.of([schedule], staging_bytes=staging)
    run_all(
        lower(
            schedule,
            r,
            source=held.bindings.get(r),
            target=wanted.bindings.get(r),
            memory=Slots.private(sizes.nbytes),
            sizes=sizes,
        )
        for r in ranks
    )
    assert wanted.differences(tensors) == []


@settings(deadline=None)
@given(cases())
def test_digests_are_the_same_under_shuffled_input(case):
    (source, target), topology, bucket, disabled = case
    shuffled = []
    for side in (source, target):
        ranks = list(side.ranks)
        random.Random(7).shuffle(ranks)
        shuffled.append(Manifest.of(ranks))
    plans = [plan_transfer(source, target), plan_transfer(*shuffled)]
    assert plans[0].digest() == plans[1].digest()
    schedules = [build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled) for plan in plans]
    assert schedules[0].digest() == schedules[1].digest()


def with_sets(plan: TransferPlan, column: str, atom: int, ranks: tuple[int, ...]) -> TransferPlan:
    """The plan with other holders or wanters of one atom."""
    changed = getattr(plan, column).copy()
    changed[atom] = len(plan.rank_sets)
    return dataclasses.replace(plan, rank_sets=(*plan.rank_sets, ranks), **{column: changed})


def rows_of(plan: TransferPlan, rows) -> TransferPlan:
    columns = {name: getattr(plan, name)[rows] for name in ("tensor", "lo", "hi", "holders", "wanters")}
    return dataclasses.replace(plan, **columns)


@settings(deadline=None)
@given(cases(), st.data())
def test_a_wrong_plan_is_found(case, data):
    (source, target), _, _, _ = case
    plan = plan_transfer(source, target)
    assume(len(plan))
    atom = data.draw(st.integers(0, len(plan) - 1))
    wanters, holders = plan.rank_sets[plan.wanters[atom]], plan.rank_sets[plan.holders[atom]]
    stranger = max(ranked.rank for ranked in (*source.ranks, *target.ranks)) + 1
    for wrong in (
        with_sets(plan, "wanters", atom, wanters[1:]),
        with_sets(plan, "wanters", atom, (*wanters, stranger)),
        with_sets(plan, "holders", atom, (*holders, stranger)),
        with_sets(plan, "holders", atom, ()),
        rows_of(plan, np.delete(np.arange(len(plan)), atom)),
        rows_of(plan, np.sort(np.append(np.arange(len(plan)), atom))),
    ):
        with pytest.raises(PlanError):
            wrong.check(source, target)


def with_hops(schedule: Schedule, rows) -> Schedule:
    """The schedule with these rows of its hops; parents follow."""
    number = np.full(len(schedule.hops) + 1, -1)
    number[rows] = np.arange(len(rows))
    columns = {name: getattr(schedule.hops, name)[rows] for name in Hops.__slots__}
    columns["parent"] = number[columns["parent"]]
    first = np.searchsorted(columns["payload"], np.arange(len(schedule.payloads) + 1))
    return dataclasses.replace(
        schedule, hops=Hops(**columns), payloads=dataclasses.replace(schedule.payloads, first_hop=first)
    )


@settings(deadline=None)
@given(cases(), st.data())
def test_a_dropped_or_doubled_hop_is_found(case, data):
    (source, target), topology, bucket, disabled = case
    plan = plan_transfer(source, target)
    schedule = build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled)
    count = len(schedule.hops)
    assume(count)
    hop = data.draw(st.integers(0, count - 1))
    for rows in (np.delete(np.arange(count), hop), np.sort(np.append(np.arange(count), hop))):
        with pytest.raises(PlanError):
            with_hops(schedule, rows).check(plan)


@settings(deadline=None)
@given(cases(), st.data())
def test_a_wrong_end_or_a_wrong_parcel_is_found(case, data):
    (source, target), topology, bucket, disabled = case
    plan = plan_transfer(source, target)
    schedule = build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled)
    assume(len(schedule.hops))
    stranger = max(ranked.rank for ranked in (*source.ranks, *target.ranks)) + 1
    hop = data.draw(st.integers(0, len(schedule.hops) - 1))
    parcel = data.draw(st.integers(0, len(schedule.parcels) - 1))
    for end in ("sender", "receiver"):
        changed = getattr(schedule.hops, end).copy()
        changed[hop] = stranger
        with pytest.raises(PlanError):
            dataclasses.replace(schedule, hops=dataclasses.replace(schedule.hops, **{end: changed})).check(plan)
    for corner in ("lo", "hi"):
        changed = getattr(schedule.parcels, corner).copy()
        changed[parcel, 0] += 1
        wrong = dataclasses.replace(schedule.parcels, **{corner: changed})
        with pytest.raises(PlanError):
            dataclasses.replace(schedule, parcels=wrong).check(plan)


def test_an_element_delivered_twice_does_not_make_up_for_a_missing_one():
    rows = Layout((4, 2), Mesh.of(tp=2), (Shard(0),))
    source = manifest_from_layouts("source", {"w": rows}, dtype="uint8")
    target = manifest_from_layouts(
        "target", {"w": Layout((4, 2), Mesh.of(first_rank=2, dp=1), (Replicate(),))}, dtype="uint8"
    )
    plan = plan_transfer(source, target)
    plan.check(source, target)
    first = np.array([0, 0])
    doubled = dataclasses.replace(plan, lo=plan.lo[first], hi=plan.hi[first], holders=plan.holders[first])
    with pytest.raises(PlanError, match="has elements delivered twice"):
        doubled.check(source, target)
