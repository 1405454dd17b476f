"""Staged refits: the old weights are whole until everything has arrived, and nobody takes over alone."""

import re

import pytest
import torch
from clusters import SHAPES, WORLD, Cluster, settings, weights

from refit_transport.errors import RefitTransportError, TransferError, VerificationError, VersionError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.testing.threads import run_ranks

EXPERT = "model.layers.0.mlp.experts.up_proj.weight"


def versions_served(cluster):
    """Which of versions 1 and 2 each target serves; "torn" where it is neither."""
    found = {}
    for rank in cluster.targets:
        differing = {v: {d for d in cluster.wanted.differences(weights(v)) if f"rank {rank}" in d} for v in (1, 2)}
        found[rank] = next((version for version, names in differing.items() if not names), "torn")
    return found


def served_first(cluster, channel, prepare=None):
    """A session after version 1, with version 2 in the sources."""
    session = (prepare or cluster.prepare)(channel)
    session.run(1)
    meet(channel, "one")
    if channel.rank == 0:
        cluster.set_version(2)
    meet(channel, "two")
    return session


def meet(channel, where):
    channel.agree(f"{where}/0", "", deadline=Deadline(20.0))


@pytest.mark.parametrize("changes", [{}, {"coverage": "ffn"}, {"transport": "gather_broadcast"}])
@pytest.mark.parametrize("opaque", [None, {"model.norm.weight": "it is a secret"}])
def test_targets_serve_the_old_version_until_finish_and_the_new_one_after(changes, opaque):
    cluster = Cluster(settings(verify="full", commit="staged", **changes), opaque=opaque)

    def rank_main(channel):
        session = served_first(cluster, channel)
        session.begin()
        session.transfer(2)
        meet(channel, "arrived")
        before = versions_served(cluster)
        meet(channel, "seen")
        report = session.finish()
        meet(channel, "finished")
        assert session.version == 2
        return before, report, versions_served(cluster)

    found = run_ranks(WORLD, rank_main)
    before, report, after = found[0]
    assert set(before.values()) == {1}
    assert set(after.values()) == {2}
    assert report.version == 2
    assert sum(rank.verified for rank in report.ranks) > 0


def test_the_plan_states_the_memory_that_a_target_keeps():
    in_place, staged = Cluster(settings()), Cluster(settings(commit="staged"))

    def extra(cluster):
        return run_ranks(WORLD, lambda channel: cluster.prepare(channel).plan.extra_bytes(channel.rank))

    def kept(channel):
        session = staged.prepare(channel)
        held = session._endpoint.target
        return 0 if held is None else sum(buffer.nbytes for buffer in held.buffers().values())

    more = [b - a for a, b in zip(extra(in_place), extra(staged), strict=True)]
    assert more == run_ranks(WORLD, kept)
    assert more[:4] == [0] * 4
    assert min(more[4:]) > 0


def test_a_transfer_that_fails_leaves_every_target_as_it_was():
    cluster = Cluster(settings(commit="staged", verify="full"))
    source = next(iter(cluster.held.bindings.values())).buffers

    def rank_main(channel):
        session = served_first(cluster, channel)
        if channel.rank == 0:
            # A replica of the sources is spoilt after the comparison of replicas, at the first refit.
            source[EXPERT].view(-1)[0] += 1
        meet(channel, "spoilt")
        session.begin()
        with pytest.raises(RefitTransportError):
            session.transfer(2)
        return session.version

    assert run_ranks(WORLD, rank_main) == [1] * WORLD
    assert set(versions_served(cluster).values()) == {1}


@pytest.mark.parametrize("rank", [4, 7])
def test_a_target_that_fails_to_take_over_keeps_all_from_reporting_the_version(rank):
    cluster = Cluster(settings(commit="staged"))

    def refuse():
        raise ValueError("out of order")

    def rank_main(channel):
        session = served_first(cluster, channel)
        if channel.rank == rank:
            cluster.targets[rank].finish = refuse
        session.begin()
        session.transfer(2)
        with pytest.raises(TransferError, match="out of order") as caught:
            session.finish()
        with pytest.raises(TransferError, match="this one is broken"):
            session.begin()
        return session.version, caught.value.phase

    found = run_ranks(WORLD, rank_main)
    assert {version for version, _ in found} == {1}
    assert found[rank][1] == "commit"


def test_what_is_served_is_compared_with_what_had_arrived():
    cluster = Cluster(settings(commit="staged", verify="sample"))
    target = cluster.targets[5]

    def spoil():
        cluster.wanted.bindings[5].buffers[EXPERT].view(torch.uint8).view(-1)[3] ^= 1

    def rank_main(channel):
        session = served_first(cluster, channel)
        if channel.rank == 5:
            target.finish = spoil
        session.begin()
        session.transfer(2)
        with pytest.raises(RefitTransportError, match=re.escape(EXPERT)) as caught:
            session.finish()
        return caught.value

    found = run_ranks(WORLD, rank_main)
    assert isinstance(found[5], VerificationError)
    assert (found[5].tensor, found[5].target_rank, found[5].version) == (EXPERT, 5, 2)


def test_a_version_that_does_not_grow_moves_nothing_and_the_session_goes_on():
    cluster = Cluster(settings(commit="staged"))

    def rank_main(channel):
        session = served_first(cluster, channel)
        session.begin()
        with pytest.raises(VersionError):
            session.transfer(1)
        session.run(2)
        meet(channel, "done")
        return versions_served(cluster)

    assert all(set(found.values()) == {2} for found in run_ranks(WORLD, rank_main))
    assert set(SHAPES) == set(weights(1))
