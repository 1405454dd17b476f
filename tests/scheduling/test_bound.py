"""The lower bound against an enumeration of node sets, and every schedule's makespan at or above it."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.bound import bound
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.makespan import simulate
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.scheduling.topology import Nic, Topology
from refit_transport.testing.strategies import manifest_pairs

SLACK = 1 - 1e-9


@st.composite
def machines(draw, ranks):
    """Up to 3 domains over the ranks, a NIC each or one per rank, of different rates."""
    count = draw(st.integers(1, 3))
    homes = [draw(st.integers(0, count - 1)) for _ in ranks]
    domains = [[r for r, home in zip(ranks, homes, strict=True) if home == domain] for domain in range(count)]
    plain = Topology.of(domains, nics=draw(st.sampled_from(("domain", "rank"))))
    rates = [draw(st.sampled_from((100.0, 250.0, 1000.0))) for _ in plain.nics]
    nics = tuple(Nic(nic.ranks, rate) for nic, rate in zip(plain.nics, rates, strict=True))
    return Topology(plain.domains, nics, local_rate=draw(st.sampled_from((500.0, 5000.0))))


@st.composite
def cases(draw):
    source, target = draw(manifest_pairs())
    ranks = sorted({ranked.rank for side in (source, target) for ranked in side.ranks})
    return plan_transfer(source, target), draw(machines(ranks))


def enumerated(plan, topology, *, forwarding):
    """No solver: some set of domains must send all that only they can, at their rate together; the worst such set."""
    moved = defaultdict(int)
    for row, nbytes in enumerate(plan.nbytes().tolist()):
        holders, wanters = plan.rank_sets[plan.holders[row]], plan.rank_sets[plan.wanters[row]]
        near = {topology.domain(rank) for rank in holders}
        foreign = frozenset({topology.domain(rank) for rank in wanters} - near)
        if foreign:
            moved[frozenset(near), foreign] += nbytes
    rates = [sum(topology.nics[nic].rate for nic in nics) for nics in topology.nics_of_domains]
    entering = defaultdict(int)
    for (_, foreign), nbytes in moved.items():
        for domain in foreign:
            entering[domain] += nbytes
    receiving = max((n / rates[domain] for domain, n in entering.items()), default=0.0)
    every = sorted({domain for holding, _ in moved for domain in holding})
    copies = {key: 1 if forwarding else len(key[1]) for key in moved}
    subsets = itertools.chain.from_iterable(itertools.combinations(every, k) for k in range(1, len(every) + 1))
    sending = max(
        (
            sum(n * copies[key] for key, n in moved.items() if key[0] <= set(some)) / sum(rates[d] for d in some)
            for some in subsets
        ),
        default=0.0,
    )
    return receiving, sending


@settings(deadline=None)
@given(cases())
def test_the_bound_without_forwarding_is_the_enumerated_one(case):
    plan, topology = case
    receiving, sending = enumerated(plan, topology, forwarding=False)
    found = bound(plan, topology, forwarding="none")
    assert found.receiving == pytest.approx(receiving)
    assert found.sending == pytest.approx(sending)


@settings(deadline=None)
@given(cases())
def test_with_forwarding_each_byte_still_leaves_a_holder_once(case):
    plan, topology = case
    _, once = enumerated(plan, topology, forwarding=True)
    allowed, none = bound(plan, topology).sending, bound(plan, topology, forwarding="none").sending
    assert once * SLACK <= allowed <= none / SLACK


@settings(deadline=None)
@given(cases(), st.sets(st.sampled_from(PASSES)), st.sampled_from((7, 64, 4096)))
def test_no_schedule_beats_the_bound(case, disabled, bucket):
    plan, topology = case
    least = bound(plan, topology, forwarding="allowed").seconds
    schedule = build_schedule(plan, topology, bucket_bytes=bucket, disabled=disabled)
    assert simulate(schedule, topology).seconds >= least * SLACK
    for chains in ("nic", "single"):
        if len(plan):
            chain = build_broadcast(plan, topology, chains=chains, bucket_bytes=bucket)
            assert simulate(chain, topology).seconds >= least * SLACK


@settings(deadline=None)
@given(cases())
def test_busiest_nics_are_those_of_the_traffic(case):
    plan, topology = case
    schedule = build_schedule(plan, topology, bucket_bytes=64)
    found, traffic = simulate(schedule, topology), schedule.traffic()
    for by_rank, by_nic in ((traffic.network_sent, found.sent), (traffic.network_received, found.received)):
        expected = [sum(by_rank.get(rank, 0) for rank in nic.ranks) for nic in topology.nics]
        assert list(by_nic) == expected


def replicas(count, *, size=1 << 20):
    """TP4 sources and a replica on each of `count` nodes of two ranks."""
    source = Layout((64, size // 64), Mesh.of(tp=4), (Shard(0),))
    target = Layout((64, size // 64), Mesh.of(first_rank=4, dp=count, tp=2), (Replicate(), Shard(0)))
    pair = (
        manifest_from_layouts("source", {"w": source}, dtype="uint8"),
        manifest_from_layouts("target", {"w": target}, dtype="uint8"),
    )
    nodes = (range(4), *(range(4 + 2 * n, 6 + 2 * n) for n in range(count)))
    return plan_transfer(*pair), nodes


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("nics", ["domain", "rank"])
def test_forwarding_keeps_the_makespan_near_the_bound_however_many_replicas(count, nics):
    plan, nodes = replicas(count)
    topology = Topology.of(nodes, nics=nics, nic_rate=1e6, local_rate=1e9)
    least = bound(plan, topology).seconds
    ours = simulate(build_schedule(plan, topology, bucket_bytes=1 << 12), topology).seconds
    assert ours <= 1.1 * least
    fed = simulate(build_schedule(plan, topology, bucket_bytes=1 << 12, disabled=("forward",)), topology).seconds
    assert fed >= 0.95 * max(1, count) * (1 << 20) / sum(
        nic.rate for nic in topology.nics[: 1 if nics == "domain" else 4]
    )
