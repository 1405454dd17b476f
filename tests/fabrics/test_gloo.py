"""The gloo fabric on real sockets, one thread per rank: same bytes as the oracle, faults end in time."""

import threading
import time

import pytest
import torch

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.gloo import GlooFabric
from refit_transport.fabrics.program import Binding, SlotPool, lower
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.chain import build_chain, stage, staged_bytes
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.threads import run_ranks

SHAPES = {"a": (10, 12), "b": (64, 3), "c": (5,), "d": (7, 4, 6)}


def sides():
    train = Mesh.of(dp=2, tp=2)
    serve = Mesh.of(first_rank=4, dp=2, tp=2)
    source = {name: Layout(shape, train, (Replicate(), Shard(0))) for name, shape in SHAPES.items()}
    target = {name: Layout(shape, serve, (Replicate(), Shard(len(shape) - 1))) for name, shape in SHAPES.items()}
    return (
        manifest_from_layouts("source", source, dtype="float32"),
        manifest_from_layouts("target", target, dtype="bfloat16"),
    )


def fabric_of(channel, timeout_s=20.0):
    return GlooFabric(
        channel.group_store("t"),
        rank=channel.rank,
        world_size=channel.world_size,
        address="127.0.0.1",
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("bucket", [16, 100, 1 << 20])
def test_reshard_over_sockets_equals_the_oracle(bucket):
    source, target = sides()
    schedule = build_schedule(plan_transfer(source, target), Topology.of((range(4), range(4, 8))), bucket_bytes=bucket)
    tensors = [
        {name: coordinate_tensor(name, shape, "float32", version=v) for name, shape in SHAPES.items()} for v in (1, 2)
    ]
    held, wanted = HeldSide.of(source, tensors[0]), HeldSide.of(target)

    def rank_main(channel):
        r = channel.rank
        program = lower(
            schedule,
            r,
            source=held.bindings.get(r),
            target=wanted.bindings.get(r),
            pool=SlotPool([schedule], staging_bytes=4 * bucket),
        )
        fabric = fabric_of(channel)
        spent = [fabric.run(program, deadline=Deadline(20.0))]
        channel.agree("round/1", "done", deadline=Deadline(20.0))
        if r == 0:
            assert wanted.differences(tensors[0]) == []
            for rank, binding in HeldSide.of(source, tensors[1]).bindings.items():
                for name, buffer in held.bindings[rank].buffers.items():
                    buffer.copy_(binding.buffers[name])
        channel.agree("round/2", "go", deadline=Deadline(20.0))
        spent.append(fabric.run(program, deadline=Deadline(20.0)))
        fabric.close()
        return spent

    results = run_ranks(8, rank_main)
    assert wanted.differences(tensors[1]) == []
    traffic = schedule.traffic()
    for rank in range(8):
        planned = traffic.network_sent.get(rank, 0) + traffic.local_sent.get(rank, 0)
        assert [spent.sent_bytes for spent in results[rank]] == [planned, planned]


def test_chain_brings_whole_tensors_to_every_target():
    source, target = sides()
    staged = stage([(spec, spec.box) for spec in target.tensors])
    chain = [ranked.rank for ranked in target.ranks]
    schedule, staging = build_chain(
        source, staged, root=0, chain=chain, topology=Topology.of((range(4), range(4, 8))), chunk_bytes=64
    )
    schedule.check(source, staging)
    tensors = {name: coordinate_tensor(name, shape, "float32") for name, shape in SHAPES.items()}
    held = HeldSide.of(source, tensors)

    buffers = {r: torch.zeros(staged_bytes(staged), dtype=torch.uint8) for r in (0, *chain)}
    bindings = {m.rank: Binding.of(m, {"staging": buffers[m.rank]}) for m in staging.ranks}

    def rank_main(channel):
        r = channel.rank
        program = lower(
            schedule,
            r,
            source=held.bindings.get(r),
            target=bindings.get(r),
            pool=SlotPool([schedule], staging_bytes=1 << 10),
        )
        fabric = fabric_of(channel)
        fabric.run(program, deadline=Deadline(20.0))
        channel.agree("done", "", deadline=Deadline(20.0))
        fabric.close()

    run_ranks(8, rank_main)
    for rank in chain:
        for item in staged:
            got = buffers[rank][item.offset : item.offset + item.nbytes].view(torch.bfloat16).view(item.box.shape)
            assert torch.equal(got, tensors[item.tensor.name].to(torch.bfloat16)), (rank, item.tensor.name)


def test_a_silent_peer_ends_the_run_within_the_deadline():
    source, target = sides()
    schedule = build_schedule(plan_transfer(source, target), Topology.of((range(8),)), bucket_bytes=64)
    tensors = {name: coordinate_tensor(name, shape, "float32") for name, shape in SHAPES.items()}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target)
    release = threading.Event()

    def rank_main(channel):
        r = channel.rank
        program = lower(
            schedule,
            r,
            source=held.bindings.get(r),
            target=wanted.bindings.get(r),
            pool=SlotPool([schedule], staging_bytes=256),
        )
        fabric = fabric_of(channel)
        channel.agree("connected", "", deadline=Deadline(20.0))
        if r == 0:
            release.wait(15.0)
            return None
        began = time.monotonic()
        try:
            fabric.run(program, deadline=Deadline(2.0))
        except TransferError as error:
            return error, time.monotonic() - began
        finally:
            if r == 4:
                release.set()
        return None

    results = run_ranks(8, rank_main)
    error, seconds = results[4]
    assert seconds < 7.0
    assert error.rank == 4
    assert error.tensor in SHAPES


def test_a_taken_port_is_one_clear_error():
    holder = ControlChannel.listen(host="127.0.0.1", port=0, world_size=1, timeout_s=5.0)
    with pytest.raises(TransferError, match=r"can't listen on 127.0.0.1:\d+:"):
        ControlChannel.listen(host="127.0.0.1", port=holder.port, world_size=1, timeout_s=5.0)
