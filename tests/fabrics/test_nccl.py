"""The NCCL fabric without a GPU: the calls that it makes, and what they do under the rules of CUDA and NCCL."""

import datetime
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from fake_nccl import FakeGpu, FakeGroup, Simulation, deferred, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.errors import TransferError
from refit_transport.fabrics import rounds as rounds_module
from refit_transport.fabrics.cuda import make_group, obstacles
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.fabrics.program import lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.pour import aligned
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor

# The memory of a slot that holds a payload of `chain`.
SLOT = aligned(8)


def no_failure():
    return None


class Ranks:
    """Every rank of a schedule with a fake GPU; `record` runs their host code, `simulate` what it issued."""

    def __init__(self, pair, schedule, *, staging):
        self.pair, self.schedule = pair, schedule
        self.sizes = SlotSizes.of([schedule], staging_bytes=staging)
        self.held, self.wanted = HeldSide.of(pair[0]), HeldSide.of(pair[1])
        self.ranks = sorted(self.held.bindings.keys() | self.wanted.bindings.keys())
        self.gpus = {rank: FakeGpu() for rank in self.ranks}
        self.fabrics = {rank: self.fabric(rank) for rank in self.ranks}
        self.programs = {rank: self.program(rank) for rank in self.ranks}
        self.arrived = []

    def fabric(self, rank, *, group=None, failure=no_failure):
        memory, gpu = Slots.private(self.sizes.nbytes).own, self.gpus[rank]
        return NcclFabric(group or FakeGroup(gpu), device=gpu, rank=rank, memory=memory, failure=failure)

    def program(self, rank):
        found = lower(
            self.schedule,
            rank,
            source=self.held.bindings.get(rank),
            target=self.wanted.bindings.get(rank),
            memory=self.fabrics[rank].memory,
            sizes=self.sizes,
        )
        return deferred(found, self.gpus[rank])

    def tensors(self, version):
        specs = self.pair[0].tensors
        return {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype, version=version) for spec in specs}

    def record(self, version):
        """One refit: the caller's stream fills the source before, and looks at the target after."""
        full = HeldSide.of(self.pair[0], self.tensors(version))
        spent = {}
        for rank in self.ranks:
            gpu = self.gpus[rank]
            if rank in self.held.bindings:
                gpu.call("fill", lambda rank=rank: self.fill(full, rank))
            spent[rank] = self.fabrics[rank].run(self.programs[rank], deadline=Deadline(60.0))
            if rank in self.wanted.bindings:
                gpu.call("look", lambda rank=rank: self.look(rank, version))
        return spent

    def fill(self, full, rank):
        for name, buffer in full.bindings[rank].buffers.items():
            self.held.bindings[rank].buffers[name].copy_(buffer)

    def look(self, rank, version):
        only = HeldSide({rank: self.wanted.bindings[rank]})
        self.arrived += only.differences(self.tensors(version))

    def simulate(self, seed):
        Simulation(self.gpus, seed=seed).run()
        assert self.arrived == []


@settings(deadline=None)
@given(schedules(), st.integers(0, 1 << 10), st.integers(0, 1 << 32))
def test_every_order_that_cuda_and_nccl_allow_delivers_every_byte(case, staging, seed):
    pair, schedule = case
    ranks = Ranks(pair, schedule, staging=staging)
    for version in (1, 2):
        spent = ranks.record(version)
    ranks.simulate(seed)
    traffic = schedule.traffic()
    for rank, found in spent.items():
        assert found.sent_bytes == traffic.network_sent.get(rank, 0) + traffic.local_sent.get(rank, 0)
        assert found.received_bytes == traffic.network_received.get(rank, 0) + traffic.local_received.get(rank, 0)


def chain(*, rows=8, targets=2):
    """Rank 0 has a matrix, ranks 1 and 2 want it transposed and narrower: a payload per row, by a chain 0 -> 1 -> 2."""
    serve = Layout((rows, 4), Mesh.of(first_rank=1, dp=targets), (Replicate(),))
    source = manifest_from_layouts("source", {"w": Layout((rows, 4), Mesh.of(tp=1), (Replicate(),))}, dtype="float32")
    target = Manifest.of(
        replace(ranked, pieces=serve.pieces(ranked.rank, "w", buffer="w", strides=(1, rows)))
        for ranked in manifest_from_layouts("target", {"w": serve}, dtype="bfloat16").ranks
    )
    plan = plan_transfer(source, target)
    topology = Topology.of([[rank] for rank in range(1 + targets)])
    return (source, target), build_broadcast(plan, topology, chains="single", bucket_bytes=16)


def test_a_slot_without_rest_is_seen_by_the_simulation(monkeypatch):
    """The control of the test above: with slots that are used again at once, some order tears a payload."""
    monkeypatch.setattr(rounds_module, "RESTING_ROUNDS", 0)
    torn = 0
    for seed in range(20):
        ranks = Ranks(*chain(rows=16, targets=1), staging=2 * SLOT)
        ranks.record(1)
        try:
            ranks.simulate(seed)
        except AssertionError:
            torn += 1
    assert torn > 0


def test_a_rank_that_sits_rounds_out_unpacks_before_it_goes_on(monkeypatch):
    """Two payloads a round, two slots, and rounds 1 and 2 without this rank: in round 3 the slots are used again."""
    ranks = Ranks(*chain(rows=16, targets=1), staging=2 * SLOT)
    spread = rounds_module.Rounds(ranks.schedule.hops.payload // 2 * 3)
    monkeypatch.setattr(rounds_module.Rounds, "of", lambda *_, **__: spread)
    ranks.record(1)
    assert [len(group) for group in posts(ranks.gpus[1])] == [2] * 8
    for seed in range(10):
        copy = Ranks(*chain(rows=16, targets=1), staging=2 * SLOT)
        copy.record(1)
        copy.simulate(seed)


def test_messages_in_another_order_are_seen_by_the_simulation():
    ranks = Ranks(*chain(), staging=8 * SLOT)
    group = ranks.fabrics[1]._group
    add = group._add

    def reversed_end():
        group._open.reverse()
        return FakeGroup._end_coalescing(group)

    group._add, group._end_coalescing = add, reversed_end
    ranks.record(1)
    with pytest.raises(AssertionError):
        ranks.simulate(0)


def test_the_calls_of_a_rank_that_passes_on():
    """Two payloads of 8 bytes, six slots: rank 1 gets both in round 0 and passes both on in round 1."""
    ranks = Ranks(*chain(rows=2), staging=6 * SLOT)
    ranks.record(1)
    calls = [line for line in ranks.gpus[1].log if "look" not in line]
    assert calls == [
        # What the caller's stream does comes first.
        "e0 on caller",
        "side waits for e0",
        "wire waits for e0",
        # Round 0: nothing to pack.
        "e1 on side",
        "wire waits for e1",
        "group receive 8 0, receive 8 0",
        "wire waits for work",
        "e2 on wire",
        # Round 1 starts before round 0 is unpacked.
        "e3 on side",
        "wire waits for e3",
        "group send 8 2, send 8 2",
        "wire waits for work",
        "e4 on wire",
        "side waits for e2",
        "e5 on side",
        "unpack 0 on side",
        "unpack 1 on side",
        "e6 on side",
        "side waits for e4",
        "e7 on side",
        # The host has seen both rounds done, and asks for their errors.
        "wire waits for work",
        "wire waits for work",
    ]


def test_the_calls_of_a_rank_that_packs():
    ranks = Ranks(*chain(rows=2), staging=6 * SLOT)
    ranks.record(1)
    calls = [line for line in ranks.gpus[0].log if not line.startswith("fill")]
    assert calls == [
        "e0 on caller",
        "side waits for e0",
        "wire waits for e0",
        "e1 on side",
        "pack 0 on side",
        "pack 1 on side",
        "e2 on side",
        "e3 on side",
        "wire waits for e3",
        "group send 8 1, send 8 1",
        "wire waits for work",
        "e4 on wire",
        "side waits for e4",
        "e5 on side",
        "wire waits for work",
    ]


def posts(gpu):
    """The groups that a rank posts, as lists of (kind, bytes, peer)."""
    lines = [line.removeprefix("group ") for line in gpu.log if line.startswith("group ")]
    return [[tuple(message.split()) for message in line.split(", ")] for line in lines]


@settings(deadline=None, max_examples=30)
@given(schedules(), st.integers(0, 1 << 10))
def test_between_two_ranks_sends_and_receives_are_the_same_list(case, staging):
    ranks = Ranks(*case, staging=staging)
    ranks.record(1)
    found = {}
    for rank, gpu in ranks.gpus.items():
        for kind, size, peer in (message for group in posts(gpu) for message in group):
            ends = (rank, int(peer)) if kind == "send" else (int(peer), rank)
            found.setdefault(ends, {"send": [], "receive": []})[kind].append(int(size))
    for both in found.values():
        assert both["send"] == both["receive"]


def test_packing_keeps_ahead_of_unpacking():
    """In the steady state, round k + 1 is packed and on its way before round k is unpacked."""
    ranks = Ranks(*chain(rows=32), staging=8 * SLOT)
    ranks.record(1)
    log = ranks.gpus[2].log
    groups = [index for index, line in enumerate(log) if line.startswith("group")]
    unpacks = [index for index, line in enumerate(log) if line.startswith("unpack")]
    assert len(groups) > 4
    assert groups[1] < unpacks[0]


def test_a_hanging_round_is_aborted_at_the_deadline_and_names_the_peer():
    ranks = Ranks(*chain(), staging=8 * SLOT)
    fabric = ranks.fabric(0, group=FakeGroup(ranks.gpus[0], hangs=True))
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"not done within 0.3 s \(round 0, ranks 1\)") as caught:
        fabric.run(ranks.programs[0], deadline=Deadline(0.3))
    assert time.monotonic() - began < 3.0
    assert (caught.value.rank, caught.value.peer, caught.value.phase, caught.value.tensor) == (0, 1, "transfer", "w")
    assert ranks.gpus[0].log.count("abort") == 1
    with pytest.raises(TransferError, match="closed"):
        fabric.run(ranks.programs[0], deadline=Deadline(1.0))
    fabric.close()
    assert ranks.gpus[0].log.count("abort") == 1


def test_a_hanging_round_of_a_rank_between_two_names_both():
    ranks = Ranks(*chain(rows=64), staging=8 * SLOT)
    fabric = ranks.fabric(1, group=FakeGroup(ranks.gpus[1], hangs=True))
    with pytest.raises(TransferError, match=r"round 0, ranks 0\)"):
        fabric.run(ranks.programs[1], deadline=Deadline(0.2))


def test_another_ranks_failure_aborts_at_once():
    cause = TransferError(0, 2, "peer failure", "", "rank 2: out of memory")
    ranks = Ranks(*chain(), staging=8 * SLOT)
    fabric = ranks.fabric(0, group=FakeGroup(ranks.gpus[0], hangs=True), failure=lambda: cause)
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        fabric.run(ranks.programs[0], deadline=Deadline(30.0))
    assert caught.value is cause
    assert time.monotonic() - began < 3.0
    assert ranks.gpus[0].log.count("abort") == 1


class DeadGroup(FakeGroup):
    """NCCL finds a peer gone when the group is posted, as torch tells it."""

    def _end_coalescing(self):
        raise RuntimeError("NCCL error: remote process exited\nmore")


def test_nccls_own_error_names_rank_and_peer_and_closes():
    ranks = Ranks(*chain(), staging=8 * SLOT)
    gpu = ranks.gpus[0]
    fabric = ranks.fabric(0, group=DeadGroup(gpu))
    with pytest.raises(TransferError, match=r"rank 0 with rank 1, .*: NCCL error: remote process exited \(round 0"):
        fabric.run(ranks.programs[0], deadline=Deadline(30.0))
    assert gpu.log[-1] == "abort"


class StuckGroup(FakeGroup):
    """A call into NCCL that waits for a peer, until the group is aborted from another thread."""

    def __init__(self, gpu):
        super().__init__(gpu)
        self._aborted = threading.Event()

    def _end_coalescing(self):
        assert self._aborted.wait(20.0)
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self):
        super().abort()
        self._aborted.set()


def test_a_call_that_waits_inside_nccl_ends_at_the_deadline_too():
    ranks = Ranks(*chain(), staging=8 * SLOT)
    gpu = ranks.gpus[0]
    fabric = ranks.fabric(0, group=StuckGroup(gpu))
    with pytest.raises(TransferError, match=r"not done within 0.3 s"):
        fabric.run(ranks.programs[0], deadline=Deadline(0.3))


def test_close_leaves_without_waiting():
    ranks = Ranks(*chain(), staging=8 * SLOT)
    ranks.fabrics[0].close()
    ranks.fabrics[0].close()
    assert ranks.gpus[0].log == ["abort"]


class RecordingBackend:
    """Stands for torch's module of process groups."""

    def __init__(self, error=None):
        self.calls, self.environment = [], {}
        backend = self

        class Options:
            def __init__(self, is_high_priority_stream=False):
                self.is_high_priority_stream = is_high_priority_stream

        class ProcessGroupNCCL:
            def __init__(self, store, rank, size, options):
                backend.environment = dict(os.environ)
                backend.calls.append(("group", store, rank, size, vars(options)))
                if error:
                    raise RuntimeError(error)

            def eager_connect_single_device(self, device):
                backend.calls.append(("connect", device))

        ProcessGroupNCCL.Options = Options
        self.ProcessGroupNCCL = ProcessGroupNCCL


def made(backend):
    return make_group("store", rank=1, world_size=3, device=torch.device("cuda", 5), timeout_s=10.0, backend=backend)


def test_the_group_is_private_connected_and_survives_a_peers_death(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    backend = RecordingBackend()
    made(backend)
    options = {
        "is_high_priority_stream": True,
        "_timeout": datetime.timedelta(seconds=40),
        "group_name": "refit_transport",
        "global_ranks_in_group": [0, 1, 2],
    }
    assert backend.calls == [("group", "store", 1, 3, options), ("connect", torch.device("cuda", 5))]
    # What torch reads when it makes the group, and nobody else after it.
    assert backend.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert backend.environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert not torch.distributed.is_initialized()


def test_a_group_that_cannot_connect_is_one_error():
    with pytest.raises(TransferError, match="rank 1, phase connect: NCCL: Duplicate GPU detected"):
        made(RecordingBackend(error="Duplicate GPU detected\nstack"))


def test_every_obstacle_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    found = obstacles({"a": first, "b": cpu, "c": second})
    assert len(found) == 4
    for words in ("built without NCCL", "sees no CUDA device", "1 of its buffers are not on a GPU, such as b"):
        assert any(words in line for line in found)
    assert any("several GPUs: cuda:0, cuda:1" in line for line in found)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert obstacles({"a": first}) == ()


def test_torchs_group_has_what_we_call():
    """The names of torch 2.13's backends; the CPU build has the base class, whose NCCL subclass overrides them."""
    from torch._C._distributed_c10d import Backend, Work

    for name in ("send", "recv", "abort", "_start_coalescing", "_end_coalescing", "eager_connect_single_device"):
        assert hasattr(Backend, name)
    assert hasattr(Work, "is_completed")
    assert hasattr(Work, "wait")
