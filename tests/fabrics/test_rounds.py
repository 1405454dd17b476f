"""Rounds: what must hold of them, checked hop by hop and slot by slot without the code that makes them."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
from fake_nccl import schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.fabrics.rounds import RESTING_ROUNDS, Rounds
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.schedule import Hops, Payloads
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology


def assert_rounds_hold(schedule, slots):
    """Every rule of the docstrings, by plain loops."""
    hops, rounds = schedule.hops, Rounds.of(schedule, slots=slots).of_hop.tolist()
    used: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: {"in": [], "out": []})
    for hop in range(len(hops)):
        sender, receiver, payload = int(hops.sender[hop]), int(hops.receiver[hop]), int(hops.payload[hop])
        if sender == receiver:
            assert rounds[hop] == -1
            continue
        parent = int(hops.parent[hop])
        # What a hop brings is sent on in a later round.
        assert rounds[hop] >= 0
        assert parent < 0 or rounds[hop] > rounds[parent]
        used[sender, payload]["out"].append(rounds[hop])
        used[receiver, payload]["in"].append(rounds[hop])
    by_rank = defaultdict(list)
    for (rank, _), rows in sorted(used.items()):
        everything = rows["in"] + rows["out"]
        by_rank[rank].append((min(everything), max(everything)))
    for lives in by_rank.values():
        # The i-th payload uses slot i modulo the number of slots.
        for slot in range(slots):
            ends = lives[slot::slots]
            assert all(after[0] > before[1] + RESTING_ROUNDS for before, after in pairwise(ends))
        # And so there are never more at a time than slots.
        for number in {first for first, _ in lives}:
            assert sum(first <= number <= last for first, last in lives) <= slots


@settings(deadline=None)
@given(schedules(), st.integers(1, 9))
def test_rounds_of_any_schedule(case, slots):
    assert_rounds_hold(case[1], slots)


def sides(targets):
    train = Layout((64, 8), Mesh.of(tp=2), (Shard(0),))
    serve = Layout((64, 8), Mesh.of(first_rank=2, dp=targets), (Replicate(),))
    return (
        manifest_from_layouts("source", {"w": train}, dtype="uint8"),
        manifest_from_layouts("target", {"w": serve}, dtype="uint8"),
    )


def test_a_chain_is_a_pipeline():
    """16 payloads down a chain of gather and 4 targets: one more round per further payload, not five."""
    plan = plan_transfer(*sides(4))
    topology = Topology.of([[0, 1]] + [[rank] for rank in range(2, 6)])
    schedule = build_broadcast(plan, topology, chains="single", bucket_bytes=32)
    assert_rounds_hold(schedule, 6)
    hops, rounds = schedule.hops, Rounds.of(schedule, slots=6).of_hop
    deepest = max(np.bincount(hops.payload))
    busiest = max(len(np.unique(hops.payload[hops.receiver == rank])) for rank in range(2, 6))
    # With six slots, of which one rests and one is passed on, at least two payloads go in each round.
    assert rounds.max() + 1 <= busiest / 2 + deepest + 1


def test_with_slots_for_everything_there_are_as_many_rounds_as_hops_in_a_row():
    plan = plan_transfer(*sides(2))
    schedule = build_schedule(plan, Topology.of(((0, 1), (2,), (3,))), bucket_bytes=16)
    rounds = Rounds.of(schedule, slots=1000).of_hop
    assert rounds.max() == 1
    assert set(rounds[schedule.hops.parent < 0].tolist()) == {0}


def test_a_schedule_without_hops_has_no_rounds():
    plan = plan_transfer(*sides(2), tensors=())
    assert len(Rounds.of(build_schedule(plan, Topology.of(((0, 1, 2, 3),)), bucket_bytes=16), slots=2).of_hop) == 0


def hand_made(*routes):
    """A schedule of one-byte payloads, each a list of (sender, receiver, parent's place in the list or -1)."""
    plan = plan_transfer(*sides(2))
    base = build_schedule(plan, Topology.of(((0, 1, 2, 3),)), bucket_bytes=1 << 20)
    first = np.concatenate(([0], np.cumsum([len(route) for route in routes])))
    rows = [
        (payload, sender, receiver, parent + int(first[payload]) if parent >= 0 else -1)
        for payload, route in enumerate(routes)
        for sender, receiver, parent in route
    ]
    payload, sender, receiver, parent = np.array(rows, dtype=np.int64).T
    hops = Hops(payload, sender, receiver, parent, np.zeros(len(rows), dtype=bool))
    ones = np.ones(len(routes), dtype=np.int64)
    return type(base)(base.parcels, Payloads(ones, ones, np.arange(len(routes) + 1), first.astype(np.int64)), hops)


def test_rounds_worked_out_by_hand():
    chain = [(0, 1, -1), (1, 2, 0)]
    direct = [(0, 1, -1)]
    # Rank 1 has the slot of payload 0 in rounds 0 and 1 and lets it rest in 2: with two slots, one payload a round, and
    # the third payload meets the first one's slot again in round 3.
    assert Rounds.of(hand_made(chain, direct, direct), slots=2).of_hop.tolist() == [0, 1, 1, 3]
    # With six slots two payloads start at once: three lives of a slot go into six, twice.
    assert Rounds.of(hand_made(chain, direct, direct), slots=6).of_hop.tolist() == [0, 1, 0, 1]
    # Payload 1 meets payload 0 only in rank 2, where payload 0 arrives a round later than it starts.
    assert Rounds.of(hand_made(chain, [(3, 2, -1)]), slots=1).of_hop.tolist() == [0, 1, 3]
    # Here they don't meet: there is no reason to wait.
    assert Rounds.of(hand_made(chain, [(3, 4, -1)]), slots=1).of_hop.tolist() == [0, 1, 0]
    # A copy has no round.
    assert Rounds.of(hand_made([(5, 5, -1)], direct), slots=1).of_hop.tolist() == [-1, 0]
