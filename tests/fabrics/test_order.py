"""The executor under random delays on a wire as strict as can be: no deadlock, no slot reused too early, right bytes.

A send is done only when its receive is posted; an offer of shared memory is a view, so a slot that is overwritten
before the peer has read it shows as wrong bytes.
"""

import random
import threading
import time
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.gloo import _Execution
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import manifest_pairs

DEADLINE_S = 20.0


class Wire:
    """What all ranks share: posted sends and receives, offers and acknowledgements, under one lock."""

    def __init__(self, seed):
        self.changed = threading.Condition()
        self.posted = {}
        self.offers = defaultdict(list)
        self.acknowledged = set()
        self.broken = False
        self._random = random.Random(seed)

    def pause(self):
        with self.changed:
            seconds = self._random.choice((0.0, 0.0, 1e-4, 1e-3))
        time.sleep(seconds)

    def await_(self, condition):
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self.broken, DEADLINE_S) or self.broken:
                raise RuntimeError("nothing came")


class Transfer:
    """One send or one receive; the bytes pass when both are posted."""

    def __init__(self, wire, key, tensor, *, sends):
        self._wire, self._done = wire, False
        with wire.changed:
            other = wire.posted.pop(key, None)
            if other is None:
                wire.posted[key] = (self, tensor, sends)
                return
            peer, theirs, they_send = other
            assert they_send != sends, key
            (theirs if sends else tensor).copy_(tensor if sends else theirs)
            self._done = peer._done = True
            wire.changed.notify_all()

    def wait(self, timeout):
        self._wire.pause()
        self._wire.await_(lambda: self._done)


class Group:
    """What ProcessGroupGloo offers for point-to-point transfers."""

    def __init__(self, wire, rank):
        self._wire, self._rank = wire, rank

    def send(self, tensors, peer, tag):
        self._wire.pause()
        return Transfer(self._wire, (self._rank, peer, tag), tensors[0], sends=True)

    def recv(self, tensors, peer, tag):
        return Transfer(self._wire, (peer, self._rank, tag), tensors[0], sends=False)


class Exchange:
    """What SharedExchange offers, over memory that all threads see anyway."""

    def __init__(self, wire, rank):
        self._wire, self._rank = wire, rank

    def offer(self, peer, hop, *, offset, nbytes, deadline):
        with self._wire.changed:
            self._wire.offers[self._rank, peer].append(hop)
            self._wire.changed.notify_all()

    def take(self, peer, hop, *, deadline):
        offers = self._wire.offers[peer, self._rank]
        self._wire.await_(lambda: offers)
        assert offers.pop(0) == hop
        self._wire.pause()

    def acknowledge(self, peer, hop, *, deadline):
        with self._wire.changed:
            self._wire.acknowledged.add(hop)
            self._wire.changed.notify_all()
        # Time for the peer to overwrite what was acknowledged.
        self._wire.pause()

    def settle(self, peer, hop, *, deadline):
        self._wire.await_(lambda: hop in self._wire.acknowledged)


@st.composite
def cases(draw):
    source, target = draw(manifest_pairs(ranks="any"))
    ranks = sorted({ranked.rank for side in (source, target) for ranked in side.ranks})
    count = draw(st.integers(1, 3))
    homes = [draw(st.integers(0, count - 1)) for _ in ranks]
    domains = [[r for r, home in zip(ranks, homes, strict=True) if home == domain] for domain in range(count)]
    topology = Topology.of(domains, nics=draw(st.sampled_from(("domain", "rank"))))
    plan = plan_transfer(source, target)
    bucket = draw(st.sampled_from((16, 64, 4096)))
    if draw(st.booleans()) or not len(plan):
        disabled = draw(st.sets(st.sampled_from(PASSES)))
        return source, target, topology, build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled)
    chains = draw(st.sampled_from(("nic", "single")))
    return source, target, topology, build_broadcast(plan, topology, chains=chains, bucket_bytes=bucket)


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(2, 7), st.booleans(), st.integers(0, 1 << 30))
def test_no_deadlock_and_no_slot_reused_too_early(case, slots, shares, seed):
    assert_delivers(*case, slots=slots, shares=shares, seed=seed)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("domains", [(range(6),), (range(2), range(2, 4), range(4, 6))])
def test_many_payloads_through_two_slots(domains, shares):
    here = {"w": Layout((64, 8), Mesh.of(dp=2), (Replicate(),))}
    there = {"w": Layout((64, 8), Mesh.of(first_rank=2, dp=2, tp=2), (Replicate(), Shard(1)))}
    pair = (
        manifest_from_layouts("source", here, dtype="uint8"),
        manifest_from_layouts("target", there, dtype="uint8"),
    )
    topology = Topology.of(domains)
    schedule = build_schedule(plan_transfer(*pair), topology, bucket_bytes=16)
    for seed in range(4):
        assert_delivers(*pair, topology, schedule, slots=2, shares=shares, seed=seed)


def assert_delivers(source, target, topology, schedule, *, slots, shares, seed):
    tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in source.tensors}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target)
    ranks = sorted(held.bindings.keys() | wanted.bindings.keys())
    one = SlotSizes.of([schedule], staging_bytes=0)
    sizes = SlotSizes(one.slot_bytes, slots)
    own = {rank: Slots.private(sizes.nbytes).own for rank in ranks}
    wire = Wire(seed)

    def run(rank):
        near = [peer for peer in ranks if peer != rank and shares and topology.is_local(rank, peer)]
        memories = {peer: own[peer] for peer in near}
        program = lower(
            schedule,
            rank,
            source=held.bindings.get(rank),
            target=wanted.bindings.get(rank),
            memory=Slots(own[rank], memories),
            sizes=sizes,
        )
        exchange = Exchange(wire, rank) if near else None
        try:
            _Execution(Group(wire, rank), exchange, program, Deadline(DEADLINE_S)).run()
        except BaseException as error:  # noqa: BLE001  # told below
            errors.append((rank, error))
            with wire.changed:
                wire.broken = True
                wire.changed.notify_all()

    errors = []
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    assert not errors
    assert not wire.posted
    assert wanted.differences(tensors) == []
    assert wanted.strays() == []


def test_the_wire_is_strict():
    """A control: a send without its receive doesn't end."""
    wire = Wire(0)
    sent = Transfer(wire, (0, 1, 0), coordinate_tensor("w", (4,), "uint8"), sends=True)
    timer = threading.Timer(0.1, lambda: setattr(wire, "broken", True) or notify(wire))
    timer.start()
    with pytest.raises(RuntimeError, match="nothing came"):
        sent.wait(None)


def notify(wire):
    with wire.changed:
        wire.changed.notify_all()
