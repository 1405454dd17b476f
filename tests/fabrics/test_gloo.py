"""The gloo fabric on real sockets and shared memory, a thread per rank: bytes as the oracle's, faults end in time."""

import threading
import time

import pytest

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.threads import run_ranks

SHAPES = {"a": (10, 12), "b": (64, 3), "c": (5,), "d": (7, 4, 6)}
FOUR_DOMAINS = (range(2), range(2, 4), range(4, 6), range(6, 8))


def sides(*, full=False):
    train = Mesh.of(dp=2, tp=2)
    serve = Mesh.of(first_rank=4, dp=2, tp=2)
    source = {name: Layout(shape, train, (Replicate(), Shard(0))) for name, shape in SHAPES.items()}
    cuts = {name: Replicate() if full else Shard(len(shape) - 1) for name, shape in SHAPES.items()}
    target = {name: Layout(shape, serve, (Replicate(), cuts[name])) for name, shape in SHAPES.items()}
    return (
        manifest_from_layouts("source", source, dtype="float32"),
        manifest_from_layouts("target", target, dtype="bfloat16"),
    )


def tensors(version):
    return {name: coordinate_tensor(name, shape, "float32", version=version) for name, shape in SHAPES.items()}


class Run:
    """A schedule, both sides' buffers, and what each rank does with them."""

    def __init__(self, pair, schedule, topology, *, staging, shared_memory="auto"):
        self.source, self.target = pair
        self.schedule, self.topology = schedule, topology
        self.sizes = SlotSizes.of([schedule], staging_bytes=staging)
        self.settings = RefitSettings(shared_memory=shared_memory, timeout_s=20.0)
        self.held, self.wanted = HeldSide.of(self.source, tensors(1)), HeldSide.of(self.target)

    def connect(self, channel):
        return connect_fabric(
            channel, self.topology, self.settings, slot_bytes=self.sizes.nbytes, deadline=Deadline(20.0)
        )

    def program(self, rank, fabric):
        return lower(
            self.schedule,
            rank,
            source=self.held.bindings.get(rank),
            target=self.wanted.bindings.get(rank),
            memory=fabric.memory,
            sizes=self.sizes,
        )

    def set_version(self, version):
        for rank, binding in HeldSide.of(self.source, tensors(version)).bindings.items():
            for name, buffer in binding.buffers.items():
                self.held.bindings[rank].buffers[name].copy_(buffer)

    def twice(self, channel):
        """Two refits with other values; returns what was spent in each."""
        fabric = self.connect(channel)
        program = self.program(channel.rank, fabric)
        spent = [fabric.run(program, deadline=Deadline(20.0))]
        channel.agree("round/1", "done", deadline=Deadline(20.0))
        if channel.rank == 0:
            assert self.wanted.differences(tensors(1)) == []
            self.set_version(2)
        channel.agree("round/2", "go", deadline=Deadline(20.0))
        spent.append(fabric.run(program, deadline=Deadline(20.0)))
        channel.agree("round/3", "done", deadline=Deadline(20.0))
        fabric.close()
        return spent

    def assert_exact(self):
        results = run_ranks(8, self.twice)
        assert self.wanted.differences(tensors(2)) == []
        traffic = self.schedule.traffic()
        for rank in range(8):
            planned = traffic.network_sent.get(rank, 0) + traffic.local_sent.get(rank, 0)
            assert [spent.sent_bytes for spent in results[rank]] == [planned, planned]


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("bucket", [16, 100, 1 << 20])
@pytest.mark.parametrize("domains", [(range(8),), (range(4), range(4, 8)), FOUR_DOMAINS])
@pytest.mark.parametrize("disabled", [(), PASSES])
def test_reshard_equals_the_oracle(bucket, shared_memory, domains, disabled):
    pair, topology = sides(), Topology.of(domains)
    schedule = build_schedule(plan_transfer(*pair), topology, bucket_bytes=bucket, disabled=disabled)
    Run(pair, schedule, topology, staging=4 * bucket, shared_memory=shared_memory).assert_exact()


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
@pytest.mark.parametrize("chains", ["nic", "single"])
@pytest.mark.parametrize("nics", ["domain", "rank"])
def test_chains_bring_whole_tensors_to_every_target(shared_memory, chains, nics):
    pair, topology = sides(full=True), Topology.of(FOUR_DOMAINS, nics=nics)
    plan = plan_transfer(*pair)
    schedule = build_broadcast(plan, topology, chains=chains, bucket_bytes=100)
    schedule.check(plan)
    Run(pair, schedule, topology, staging=400, shared_memory=shared_memory).assert_exact()


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
def test_a_silent_peer_ends_the_run_within_the_deadline(shared_memory):
    pair, topology = sides(), Topology.of((range(8),))
    schedule = build_schedule(plan_transfer(*pair), topology, bucket_bytes=64, disabled=("balance",))
    run = Run(pair, schedule, topology, staging=256, shared_memory=shared_memory)
    release = threading.Event()

    def rank_main(channel):
        fabric = run.connect(channel)
        program = run.program(channel.rank, fabric)
        channel.agree("connected", "", deadline=Deadline(20.0))
        if channel.rank == 0:
            release.wait(15.0)
            return None
        began = time.monotonic()
        try:
            fabric.run(program, deadline=Deadline(2.0))
        except TransferError as error:
            return error, time.monotonic() - began
        finally:
            if channel.rank == 4:
                release.set()
        return None

    results = run_ranks(8, rank_main)
    error, seconds = results[4]
    assert seconds < 7.0
    assert error.rank == 4
    assert error.tensor in SHAPES
    assert error.reason.startswith("round ")
    assert "within 2 s" in error.reason


def test_a_taken_port_is_one_clear_error():
    holder = ControlChannel.listen(host="127.0.0.1", port=0, world_size=1, timeout_s=5.0)
    with pytest.raises(TransferError, match=r"can't listen on 127.0.0.1:\d+:"):
        ControlChannel.listen(host="127.0.0.1", port=holder.meeting.port, world_size=1, timeout_s=5.0)
