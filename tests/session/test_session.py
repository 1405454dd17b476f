"""Whole sessions over real sockets, with plain tensors on both sides."""

import re
import threading
import time

import pytest
import torch
from clusters import EXPERTS, SHAPES, SOURCES, WORLD, Cluster, refit_versions, settings, weights
from third_party_transport import Counting

from refit_transport import connect as connect_module
from refit_transport.errors import AgreementError, LayoutError, TransferError, VerificationError, VersionError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.session import RefitSession
from refit_transport.testing.sides import HeldSource
from refit_transport.testing.threads import run_ranks


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"coverage": "all"}, 0),
        ({"coverage": "ffn"}, 3),
        ({"transport": "gather_broadcast"}, 5),
    ],
)
def test_weights_follow_a_b_a_b_under_every_route(changes, whole):
    cluster = Cluster(settings(verify="full", **changes))
    reports = refit_versions(cluster, [1, 2, 1, 2])
    summary = reports[-1].summary
    assert [report.version for report in reports] == [1, 2, 3, 4]
    assert sum(len(names) for names in summary.whole.values()) == whole
    assert sum(part.tensors for part in summary.transports) == len(SHAPES)
    for report in reports:
        assert all(rank.received_bytes == summary.received_by_rank.get(rank.rank, 0) for rank in report.ranks)
        assert sum(rank.verified for rank in report.ranks) > 0
    targets = cluster.targets.values()
    assert all(t.calls == ["manifest"] + ["begin", "finish"] * 4 for t in targets)
    # Under "ffn" the experts go shard-to-shard; under "gather_broadcast" they arrive whole, one by one.
    experts = {f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("up", "down")}
    others = SHAPES.keys() - set(EXPERTS)
    expected = {0: set(), 3: others, 5: others | experts}[whole]
    assert all(set(t.loaded) == expected for t in targets)


@pytest.mark.parametrize("coverage", ["ffn", "all"])
def test_a_refit_checks_out_and_stays_in_its_footprint(coverage):
    cluster = Cluster(settings(coverage=coverage))

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(1)
        used = []
        for transport in session.plan.transports.values():
            transport.check()
            slots = {step.slot_offset for step in transport._program.steps} - {None}
            staging = getattr(transport, "_staging", torch.empty(0))
            used.append(len(slots) * transport._sizes.slot_bytes + staging.nbytes)
            assert used[-1] <= transport.footprint().staging_bytes[channel.rank]
        session.close()
        return sum(used)

    assert max(run_ranks(WORLD, rank_main)) > 0


def test_a_transport_of_another_package_carries_everything():
    cluster = Cluster(settings(transport="third_party_transport:Counting"))
    summary = refit_versions(cluster, [1, 2])[1].summary
    assert [(part.name, part.tensors) for part in summary.transports] == [("third_party_transport:Counting", 5)]
    assert Counting.runs == 2 * WORLD


def test_each_byte_enters_a_domain_once_and_the_old_way_moves_more():
    cluster = Cluster(settings(), dtypes=("float32", "float32"))
    summary = refit_versions(cluster, [1])[0].summary
    payload = 4 * sum(weights(1)[name].numel() for name in SHAPES)
    assert summary.network_bytes == payload
    assert summary.received_bytes == 2 * payload
    assert summary.old_way_received_bytes > 4 * payload


def test_a_tensor_that_the_target_takes_whole_goes_by_gather_broadcast_with_the_reason():
    cluster = Cluster(settings(), opaque={"model.norm.weight": "its loader computes"})
    summary = refit_versions(cluster, [1, 2])[1].summary
    assert summary.whole == {"gather_broadcast: the target takes it whole: its loader computes": ("model.norm.weight",)}
    assert all(set(t.loaded) == {"model.norm.weight"} for t in cluster.targets.values())


def test_a_version_that_does_not_grow_is_refused_with_both_numbers():
    cluster = Cluster(settings())

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(7)
        session.begin()
        with pytest.raises(VersionError, match=r"7 refused: it must be larger than the last one, 7"):
            session.transfer(7)
        session.run(8)
        return session.version

    assert run_ranks(WORLD, rank_main) == [8] * WORLD


def test_the_control_channel_does_not_grow_with_the_number_of_refits():
    cluster = Cluster(settings(verify="full"))

    def rank_main(channel):
        session = cluster.prepare(channel)
        keys = []
        for version in range(1, 7):
            session.run(version)
            channel.agree(f"counted/{version}", "", deadline=Deadline(20.0))
            keys.append(channel.kept())
            channel.agree(f"next/{version}", "", deadline=Deadline(20.0))
            channel.forget([f"counted/{version - 1}", f"next/{version - 1}"])
        return keys

    keys = run_ranks(WORLD, rank_main)[0]
    assert keys[2] >= keys[5] - WORLD, keys


@pytest.mark.parametrize(("verify", "version"), [("off", 3), ("full", 3), ("full", 1)], ids=str)
def test_ranks_that_refit_different_versions_all_fail_and_say_so(verify, version):
    cluster = Cluster(settings(verify=verify, timeout_s=30.0))

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(1)
        began = time.monotonic()
        with pytest.raises((AgreementError, TransferError), match="disagree about the weight version"):
            session.run(version if channel.rank == 5 else 2)
        assert time.monotonic() - began < 15.0
        assert session.version == 1
        with pytest.raises(TransferError, match="this one is broken"):
            session.begin()

    run_ranks(WORLD, rank_main)


def test_a_target_that_refuses_a_tensor_ends_the_refit_everywhere_with_its_name():
    cluster = Cluster(settings(transport="gather_broadcast", timeout_s=10.0))

    def refuse(weights):
        for name, _ in weights:
            if name == "model.norm.weight":
                raise LayoutError(name, 6, "a shape", "another")

    cluster.targets[6].load = refuse

    def rank_main(channel):
        session = cluster.prepare(channel)
        began = time.monotonic()
        with pytest.raises((LayoutError, TransferError)) as caught:
            session.run(1)
        return str(caught.value), time.monotonic() - began

    results = run_ranks(WORLD, rank_main)
    assert all("model.norm.weight" in message for message, _ in results), results
    # The cause reaches ranks that don't exchange bytes with the one that refuses, long before the timeout.
    assert all(seconds < 5.0 for _, seconds in results), results


@pytest.mark.parametrize("call", ["begin", "finish"])
def test_a_target_that_fails_to_process_keeps_every_rank_from_the_new_version(call):
    cluster = Cluster(settings(timeout_s=10.0))

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(1)
        channel.agree("first refit/0", "", deadline=Deadline(20.0))
        if channel.rank == 6:
            setattr(cluster.targets[6], call, lambda: 1 // 0)
        with pytest.raises(TransferError, match="ZeroDivisionError"):
            session.run(2)
        return session.version

    assert run_ranks(WORLD, rank_main) == [1] * WORLD


def test_versions_go_on_where_earlier_sessions_ended():
    cluster = Cluster(settings())

    def rank_main(channel):
        session = cluster.prepare(channel, version=4 if channel.rank == 5 else -1)
        session.begin()
        with pytest.raises(VersionError, match="version 3 refused: it must be larger than the last one, 4"):
            session.transfer(3)
        session.run(5)
        return session.version

    assert run_ranks(WORLD, rank_main) == [5] * WORLD


def test_a_channel_serves_one_session():
    cluster = Cluster(settings())

    def rank_main(channel):
        cluster.prepare(channel).run(1)
        with pytest.raises(TransferError, match="a control channel serves one session"):
            cluster.prepare(channel)

    run_ranks(WORLD, rank_main)


@pytest.mark.parametrize("rank", [1, 6])
def test_moved_storage_is_followed_and_another_form_is_refused(rank):
    cluster = Cluster(settings(timeout_s=10.0, verify="full"))
    side = cluster.held if rank < SOURCES else cluster.wanted
    name = "model.layers.0.self_attn.q_proj.weight"

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(1)
        if channel.rank == rank:
            buffers = side.bindings[rank].buffers
            buffers[name] = buffers[name].clone()
        channel.agree("moved/0", "", deadline=Deadline(20.0))
        if channel.rank == 0:
            cluster.set_version(2)
        channel.agree("trained/0", "", deadline=Deadline(20.0))
        session.run(2)
        channel.agree("arrived/0", "", deadline=Deadline(20.0))
        if channel.rank == 0:
            assert cluster.wanted.differences(weights(2)) == []
        channel.agree("checked/0", "", deadline=Deadline(20.0))
        if channel.rank == rank:
            buffers[name] = torch.zeros(buffers[name].numel() * 2, dtype=torch.float16)[::2]
        with pytest.raises((LayoutError, TransferError), match=r"q_proj.*as at the first refit"):
            session.run(3)

    run_ranks(WORLD, rank_main)


def test_a_failing_manifest_stops_every_rank_during_prepare():
    cluster = Cluster(settings(timeout_s=10.0))

    def refuse(rank, tensors):
        raise LayoutError("lm_head.weight", rank, "somebody to fill it", "nobody")

    cluster.targets[5].manifest = refuse

    def rank_main(channel):
        with pytest.raises((LayoutError, TransferError), match=r"lm_head.weight.*nobody"):
            cluster.prepare(channel)

    run_ranks(WORLD, rank_main)


def test_verification_names_a_box_that_differs_from_the_source():
    cluster = Cluster(settings(verify="full", transport="gather_broadcast", timeout_s=10.0))
    honest = cluster.targets[7].load

    def flip_a_bit(weights):
        honest(weights)
        cluster.wanted.bindings[7].buffers[EXPERTS[0]][3] += 1

    cluster.targets[7].load = flip_a_bit

    def rank_main(channel):
        session = cluster.prepare(channel)
        with pytest.raises((VerificationError, TransferError)) as caught:
            session.run(1)
        return str(caught.value)

    messages = run_ranks(WORLD, rank_main)
    assert all(EXPERTS[0] in message and "target rank 7" in message for message in messages), messages


@pytest.mark.parametrize("holder", [2, 3])
def test_replicas_of_a_source_that_differ_are_named_by_verification(holder):
    cluster = Cluster(settings(verify="full", timeout_s=10.0))
    first = holder - 2
    name = "model.norm.weight"
    cluster.held.bindings[holder].buffers[name][1] += 1

    def rank_main(channel):
        session = cluster.prepare(channel)
        with pytest.raises((AgreementError, VerificationError, TransferError)) as caught:
            session.run(1)
        assert session.version == -1
        # Known before a byte moved.
        assert all(
            (buffer == 255).all() for side in cluster.wanted.bindings.values() for buffer in side.buffers.values()
        )
        return str(caught.value)

    box = "[0:4]" if first == 0 else "[4:8]"
    for message in run_ranks(WORLD, rank_main):
        assert f"the ranks disagree about tensor {name}, box {box}" in message
        assert f"on rank [{first}]" in message
        assert f"on rank [{holder}]" in message


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ({3}, r"rank 3, phase prepare: a rank needs a source or a target"),
        (set(range(SOURCES)), r"rank \d, phase prepare: a rank needs a source or a target"),
        (set(range(SOURCES, WORLD)), r"rank \d, phase prepare: a rank needs a source or a target"),
    ],
)
def test_a_rank_without_a_role_is_named_at_once(without, reason):
    cluster = Cluster(settings(timeout_s=30.0))

    def rank_main(channel):
        r = channel.rank
        source = HeldSource(cluster.held.bindings[r]) if r < SOURCES and r not in without else None
        target = cluster.targets.get(r) if r not in without else None
        began = time.monotonic()
        with pytest.raises(TransferError) as caught:
            RefitSession.prepare(channel, settings=cluster.settings if r == 0 else None, source=source, target=target)
        return str(caught.value), time.monotonic() - began

    results = run_ranks(WORLD, rank_main)
    assert all(re.search(reason, message) for message, _ in results), results
    assert all(seconds < 10.0 for _, seconds in results), results


def test_a_refit_without_targets_is_refused():
    cluster = Cluster(settings())

    def rank_main(channel):
        source = HeldSource(cluster.held.bindings[channel.rank])
        with pytest.raises(TransferError, match="at least one source and one target rank"):
            RefitSession.prepare(channel, settings=cluster.settings if channel.rank == 0 else None, source=source)

    run_ranks(2, rank_main)


def test_a_fabric_that_does_not_connect_holds_nobody_longer_than_the_timeout(monkeypatch):
    """As where a peer has published its address and then stopped: gloo gives it its timeout several times over."""
    cluster, ended = Cluster(settings(timeout_s=10.0)), threading.Event()
    monkeypatch.setattr(connect_module, "GlooFabric", lambda *_, **__: ended.wait(30.0))

    def rank_main(channel):
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"phase (connect|peer failure): .*within 10 s \(timeout_s\)"):
            cluster.prepare(channel)
        return time.monotonic() - began

    seconds = run_ranks(WORLD, rank_main)
    ended.set()
    assert all(spent < 30.0 for spent in seconds), seconds
