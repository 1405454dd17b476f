"""NCCL M2N without NCCL: the calls that every rank makes, and what they deliver when each does what it says."""

import contextlib
import importlib
from dataclasses import dataclass, field

import pytest
import torch
from fake_nccl import FakeGpu, FakeGroup, Simulation, deferred

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import MissingDependencyError, TransferError
from refit_transport.fabrics import nccl_m2n
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.fabrics.nccl_m2n import NativeMove, NcclM2nFabric
from refit_transport.fabrics.program import lower
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.native import NativeSplit
from refit_transport.refit_plan import RefitPlan
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.transports import nccl_reshard
from refit_transport.transports.base import Endpoint, Job

SHAPES = {"a": (8, 12), "b": (4, 4, 8), "c": (2, 2, 2, 2), "d": (7, 4)}
NATIVE = ("a", "b")


@dataclass
class FakeM2n:
    """The module `nccl.m2n`, for one rank: keeps what it is called with; what a group records is issued at its end."""

    gpu: FakeGpu
    error: Exception | None = None
    calls: list = field(default_factory=list)
    log: list = field(default_factory=list)

    Mesh = staticmethod(lambda dims, start_rank=0: ("mesh", tuple(dims), start_rank))
    Shard = staticmethod(lambda dim: ("shard", dim))
    Replicate = staticmethod(lambda: ("replicate",))

    def init(self):
        self.log.append("init")
        return self

    def destroy(self):
        self.log.append("destroy")

    @contextlib.contextmanager
    def group(self):
        self.log.append("group")
        yield
        self.log.append("end")

    def reshard(self, src, dst, comm, stream, *, handle, **described):
        if self.error:
            raise self.error
        assert handle is self
        assert stream.name == "side"
        self.calls.append((src, dst, comm, described))
        self.log.append("reshard")


def full_of(pieces, described, side):
    """The whole tensor from the buffers of a side's ranks, in the arithmetic of the package's own documentation."""
    _, (rows, columns), first = described[f"{side}_mesh"]
    (axis,) = [axis for axis, cut in enumerate(described[f"{side}_placements"]) if cut[0] == "shard"]
    dim = described[f"{side}_placements"][axis][1]
    ranks = [first + (index * columns if axis == 0 else index) for index in range((rows, columns)[axis])]
    return torch.cat([pieces[rank] for rank in ranks], dim=dim), dim, axis, columns, first


def carry_out(modules):
    """Does what all ranks have called, call by call; every rank must describe each call alike."""
    (count,) = {len(module.calls) for module in modules.values()}
    for number in range(count):
        calls = {rank: module.calls[number] for rank, module in modules.items()}
        described = calls[min(calls)][3]
        assert all(call[3] == described for call in calls.values())
        assert {call[2] for call in calls.values()} == {77}
        sources = {rank: call[0] for rank, call in calls.items() if call[0] is not None}
        assert all(tuple(part.shape) == described["src_local_shape"] for part in sources.values())
        whole, *_ = full_of(sources, described, "src")
        targets = {rank: call[1] for rank, call in calls.items() if call[1] is not None}
        _, dim, axis, columns, first = full_of(targets, described, "dst")
        for rank, part in targets.items():
            index = (rank - first) // columns if axis == 0 else (rank - first) % columns
            size = described["dst_local_shape"][dim]
            part.copy_(whole.narrow(dim, index * size, size))


def job(fabric="nccl_m2n"):
    train, serve = Mesh.of(dp=2, tp=2), Mesh.of(first_rank=4, tp=2, dp=2)
    held = {name: Layout(shape, train, (Replicate(), Shard(0))) for name, shape in SHAPES.items()}
    wanted = {name: Layout(shape, serve, (Shard(len(shape) - 1), Replicate())) for name, shape in SHAPES.items()}
    source = manifest_from_layouts("source", held, dtype="float32")
    target = manifest_from_layouts("target", wanted, dtype="float32")
    settings = RefitSettings(fabric=fabric, coverage="all", bucket_bytes=64, staging_bytes=1024)
    return Job(source, target, Topology.of((range(4), range(4, 8))), settings)


def tensors():
    return {name: coordinate_tensor(name, shape, "float32") for name, shape in SHAPES.items()}


class Ranks:
    """Eight ranks with a fake GPU and a fake M2N each."""

    def __init__(self, *, error=None, hangs=False):
        self.job = job()
        self.held, self.wanted = HeldSide.of(self.job.source, tensors()), HeldSide.of(self.job.target)
        self.gpus = {rank: FakeGpu() for rank in range(8)}
        self.modules = {rank: FakeM2n(gpu, error=error) for rank, gpu in self.gpus.items()}
        self.plan = RefitPlan(self.job)
        self.fabrics = {rank: self.fabric(rank, hangs) for rank in range(8)}

    def fabric(self, rank, hangs):
        gpu = self.gpus[rank]
        memory = torch.empty(self.plan.slot_bytes, dtype=torch.uint8)
        group = FakeGroup(gpu, hangs=hangs)
        messages = NcclFabric(group, device=gpu, rank=rank, memory=memory, failure=lambda: None)
        return NcclM2nFabric(messages, self.modules[rank])

    def endpoint(self, rank):
        side = self.held if rank < 4 else self.wanted
        binding = side.bindings[rank]
        if rank < 4:
            return Endpoint(rank, HeldSource(binding), binding.manifest)
        return Endpoint(rank, None, None, HeldTarget(binding), binding.manifest)


def test_one_refit_mixes_native_tensors_and_messages(monkeypatch):
    ranks = Ranks()

    def on_the_fake_gpu(schedule, rank, **arguments):
        return deferred(lower(schedule, rank, **arguments), ranks.gpus[rank])

    monkeypatch.setattr(nccl_reshard, "lower", on_the_fake_gpu)
    transport = ranks.plan.transports["nccl_reshard"]
    transport.check()
    for rank in range(8):
        spent = (
            RefitPlan(ranks.job)
            .transports["nccl_reshard"]
            .run(ranks.endpoint(rank), ranks.fabrics[rank], deadline=Deadline(20.0))
        )
        assert spent.received_bytes == transport.traffic().network_received.get(rank, 0) + (
            transport.traffic().local_received.get(rank, 0)
        )
    assert {name for module in ranks.modules.values() for name in module.log} == {"init", "group", "reshard", "end"}
    assert all(len(module.calls) == len(NATIVE) for module in ranks.modules.values())
    carry_out(ranks.modules)
    Simulation(ranks.gpus, seed=1).run()
    assert ranks.wanted.differences(tensors()) == []


def test_the_plan_says_which_limit_each_tensor_meets():
    reasons = {route.tensor: route.reason for route in RefitPlan(job()).routes}
    assert all("NCCL M2N moves it whole" in reasons[name] for name in NATIVE)
    assert "by messages: it has 4 dims" in reasons["c"]
    assert "by messages: the source doesn't cut dim 0 into equal parts" in reasons["d"]
    assert all("M2N" not in route.reason for route in RefitPlan(job("gloo")).routes)


def test_fabrics_of_messages_alone_schedule_everything():
    assert RefitPlan(job("nccl")).transports["nccl_reshard"].notes() == {}
    scheduled = RefitPlan(job("gloo")).transports["nccl_reshard"].traffic()
    mixed = RefitPlan(job()).transports["nccl_reshard"].traffic()
    nbytes = {rank: 4 * sum(p.box.numel for p in job().target.ranks[rank - 4].pieces) for rank in range(4, 8)}
    for rank in range(4, 8):
        assert mixed.network_received.get(rank, 0) + mixed.local_received.get(rank, 0) == nbytes[rank]
    assert scheduled.network <= mixed.network


def moves(ranks, rank):
    split = NativeSplit.of(ranks.job.source, ranks.job.target, tuple(SHAPES))
    endpoint = ranks.endpoint(rank)
    source, target = endpoint.source_binding(), endpoint.target_binding()
    return tuple(NativeMove.of(tensor, source=source, target=target) for tensor in split.tensors)


def test_the_calls_of_one_rank():
    ranks = Ranks()
    ranks.fabrics[5].reshard(moves(ranks, 5), deadline=Deadline(20.0))
    src, dst, communicator, described = ranks.modules[5].calls[0]
    assert src is None
    assert dst.data_ptr() == ranks.wanted.bindings[5].buffers["a"].data_ptr()
    assert communicator == 77
    assert described == {
        "src_mesh": ("mesh", (2, 2), 0),
        "src_placements": [("replicate",), ("shard", 0)],
        "src_local_shape": (4, 12),
        "src_dtype": torch.float32,
        "dst_mesh": ("mesh", (2, 2), 4),
        "dst_placements": [("shard", 1), ("replicate",)],
        "dst_local_shape": (8, 6),
        "dst_dtype": torch.float32,
    }
    assert ranks.modules[5].log == ["init", "group", "reshard", "reshard", "end"]
    # The caller's work comes first, and the caller goes on after it.
    assert ranks.gpus[5].log == [
        "e0 on caller",
        "side waits for e0",
        "wire waits for e0",
        "e1 on side",
        "caller waits for e1",
    ]


def test_the_library_lets_go_before_the_group_ends():
    ranks = Ranks()
    log = ranks.gpus[0].log
    ranks.modules[0].log = log
    ranks.fabrics[0].close()
    ranks.fabrics[0].close()
    assert log == ["destroy", "abort"]


def test_its_error_closes_the_fabric_and_names_the_rank():
    ranks = Ranks(error=RuntimeError("ncclInvalidArgument: src mesh\nmore"))
    with pytest.raises(TransferError, match=r"rank 2, phase transfer: NCCL M2N: ncclInvalidArgument: src mesh$"):
        ranks.fabrics[2].reshard(moves(ranks, 2), deadline=Deadline(20.0))
    ranks.fabrics[2].close()
    # Work that may never end holds the handle.
    assert "destroy" not in ranks.modules[2].log
    assert ranks.gpus[2].log.count("abort") == 1


def test_work_that_never_ends_is_aborted_at_the_deadline(monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr("fake_nccl.FakeEvent.query", lambda _: False)
    with pytest.raises(TransferError, match=r"not done within 0.3 s"):
        ranks.fabrics[2].reshard(moves(ranks, 2), deadline=Deadline(0.3))
    assert ranks.gpus[2].log.count("abort") == 1


def test_a_plan_for_native_tensors_needs_its_fabric():
    ranks = Ranks()
    messages = ranks.fabrics[0]._messages
    with pytest.raises(TransferError, match="needs that fabric"):
        ranks.plan.transports["nccl_reshard"].run(ranks.endpoint(0), messages, deadline=Deadline(5.0))


def test_without_the_package_the_remedy_is_told(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'refit-transport\[nccl\]'"):
        nccl_m2n.load_m2n()
    assert any("nccl-extensions" in reason for reason in nccl_m2n.m2n_obstacles())


def test_an_nccl_that_is_too_old_is_told(monkeypatch):
    monkeypatch.setattr(nccl_m2n, "load_m2n", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert nccl_m2n.m2n_obstacles() == ("torch runs NCCL 2.29.7, NCCL M2N needs 2.30.5",)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 5))
    assert nccl_m2n.m2n_obstacles() == ()
