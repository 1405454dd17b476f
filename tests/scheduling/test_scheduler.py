"""What each scheduling pass saves, and what its absence costs: bytes against hand-computed numbers."""

import pytest

from refit_transport.errors import LayoutError
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology

SHAPE = (16, 16)
PAYLOAD = 256


def sides(train, train_placements, serve, serve_placements):
    return (
        manifest_from_layouts("source", {"w": Layout(SHAPE, train, train_placements)}, dtype="uint8"),
        manifest_from_layouts("target", {"w": Layout(SHAPE, serve, serve_placements)}, dtype="uint8"),
    )


def schedule_of(pair, domains, *, bucket=64, disabled=(), nics="domain"):
    plan = plan_transfer(*pair)
    schedule = build_schedule(plan, Topology.of(domains, nics=nics), bucket_bytes=bucket, disabled=disabled)
    schedule.check(plan)
    return schedule


REPLICAS = sides(Mesh.of(tp=4), (Shard(0),), Mesh.of(first_rank=4, dp=4), (Replicate(),))


def test_a_quarter_from_the_network_and_three_from_peers():
    traffic = schedule_of(REPLICAS, (range(4), range(4, 8))).traffic()
    assert traffic.network_received == dict.fromkeys(range(4, 8), PAYLOAD // 4)
    assert traffic.local_received == dict.fromkeys(range(4, 8), 3 * PAYLOAD // 4)


def test_without_deduplication_every_replica_receives_all_over_the_network():
    traffic = schedule_of(REPLICAS, (range(4), range(4, 8)), disabled=("deduplicate",)).traffic()
    assert (traffic.network, traffic.local) == (4 * PAYLOAD, 0)


def test_a_holder_in_the_own_domain_keeps_bytes_off_the_network():
    assert schedule_of(REPLICAS, (range(8),)).traffic().network == 0
    copies = sides(Mesh.of(dp=2), (Replicate(),), Mesh.of(first_rank=2, dp=2), (Replicate(),))
    for disabled, expected in ((("balance",), 0), (("balance", "local"), PAYLOAD)):
        assert schedule_of(copies, ((0, 2), (1, 3)), disabled=disabled).traffic().network == expected


def test_balance_spreads_the_load_over_source_replicas():
    pair = sides(Mesh.of(dp=2, tp=2), (Replicate(), Shard(0)), Mesh.of(first_rank=4, tp=4), (Shard(1),))
    domains = ((0, 1), (2, 3), range(4, 8))
    even = schedule_of(pair, domains).traffic().network_sent
    assert even == dict.fromkeys(range(4), PAYLOAD // 4)
    first = schedule_of(pair, domains, disabled=("balance",)).traffic().network_sent
    assert first == dict.fromkeys(range(2), PAYLOAD // 2)


def large(serve, placements):
    """A MiB on rank 0, and targets from rank 1 on."""
    held = Layout((64, 1 << 14), Mesh.of(dp=1), (Replicate(),))
    wanted = Layout((64, 1 << 14), serve, placements)
    return (
        manifest_from_layouts("source", {"w": held}, dtype="uint8"),
        manifest_from_layouts("target", {"w": wanted}, dtype="uint8"),
    )


def test_what_enters_a_domain_is_striped_over_all_that_want_it():
    pair, domains = large(Mesh.of(first_rank=1, dp=4), (Replicate(),)), (range(1), range(1, 5))
    striped = schedule_of(pair, domains, nics="rank", bucket=1 << 14).traffic()
    assert striped.network_received == dict.fromkeys(range(1, 5), 1 << 18)
    assert striped.local_received == dict.fromkeys(range(1, 5), 3 << 18)
    whole = schedule_of(pair, domains, nics="rank", bucket=1 << 14, disabled=("stripe",)).traffic()
    assert list(whole.network_received.values()) == [1 << 20]


def test_an_idle_rank_relays_for_a_busy_one():
    """Ranks 1 and 2 are in one domain; rank 1 wants all of one tensor, rank 2 only a row of another."""
    source = {
        "w": Layout((64, 1 << 14), Mesh.of(dp=1), (Replicate(),)),
        "v": Layout((1,), Mesh.of(dp=1), (Replicate(),)),
    }
    target = {
        "w": Layout((64, 1 << 14), Mesh.of(first_rank=1, dp=1), (Replicate(),)),
        "v": Layout((1,), Mesh.of(first_rank=2, dp=1), (Replicate(),)),
    }
    pair = (
        manifest_from_layouts("source", source, dtype="uint8"),
        manifest_from_layouts("target", target, dtype="uint8"),
    )
    relayed = schedule_of(pair, ((0,), (1, 2)), nics="rank", bucket=1 << 14).traffic()
    assert sum(relayed.network_received.values()) == (1 << 20) + 1
    assert max(relayed.network_received.values()) <= 0.55 * (1 << 20)
    assert relayed.local_received[1] == (1 << 20) - relayed.network_received[1]
    alone = schedule_of(pair, ((0,), (1, 2)), nics="rank", bucket=1 << 14, disabled=("relay",)).traffic()
    assert alone.network_received == {1: 1 << 20, 2: 1}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_forwarded_bytes_cross_the_network_twice_in_sequence_at_most(count):
    pair = large(Mesh.of(first_rank=1, dp=count), (Replicate(),))
    domains = tuple((rank,) for rank in range(count + 1))
    schedule = schedule_of(pair, domains, bucket=1 << 14)
    forwarded = schedule.hops.parent >= 0
    assert forwarded.any()
    assert (schedule.hops.parent[schedule.hops.parent[forwarded]] == -1).all()
    # No rank, the source included, sends more than each target receives.
    assert max(schedule.traffic().network_sent.values()) <= 1.05 * (1 << 20)
    fed = schedule_of(pair, domains, bucket=1 << 14, disabled=("forward",)).traffic()
    assert fed.network_sent == {0: count << 20}


@pytest.mark.parametrize("bucket", [1, 10, 64, 1000])
def test_payloads_hold_at_most_a_bucket(bucket):
    schedule = schedule_of(REPLICAS, (range(4), range(4, 8)), bucket=bucket)
    assert int(schedule.payloads.size.max()) <= bucket
    assert int(schedule.payloads.nbytes.sum()) == PAYLOAD


def test_what_is_passed_on_comes_after_what_brings_it():
    hops = schedule_of(REPLICAS, (range(4), range(4, 8)), bucket=16).hops
    passed_on = hops.parent >= 0
    assert passed_on.any()
    assert (hops.parent[passed_on] < passed_on.nonzero()[0]).all()
    assert (hops.receiver[hops.parent[passed_on]] == hops.sender[passed_on]).all()


def test_a_rank_in_two_domains_or_in_none_is_refused():
    with pytest.raises(LayoutError, match="rank 1: expected each rank in one topology domain"):
        Topology.of(((0, 1), (1, 2)))
    with pytest.raises(LayoutError, match="rank 7: expected a topology domain that lists it"):
        schedule_of(REPLICAS, (range(4), range(4, 7)))
