"""What one rank does in the tests of `reshard`; the ranks stay in one process group from test to test."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from refit_transport import Layout, Local, Mesh, RefitSettings, Resharder, Topology, TransferError, reshard
from refit_transport.config.settings import SharedMemory, Verify
from refit_transport.fabrics.gloo import GlooFabric
from refit_transport.layout import placement as ours
from refit_transport.testing.oracle import coordinate_tensor
from refit_transport.testing.strategies import LocalMemory
from refit_transport.views import torch_dtype

SMALL = RefitSettings(bucket_bytes=128, staging_bytes=1024, timeout_s=30.0)
_UNTOUCHED = 255


def in_group(rank: int, world_size: int, port: int) -> None:
    """Joins the one group of these processes, at the first call."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )


@dataclass(frozen=True)
class Side:
    """One tensor of one side: how it is laid out, given (a DTensor or a Local), and placed in each rank's memory."""

    layout: Layout
    kind: str
    dtype: str
    memory: Mapping[int, LocalMemory]


@dataclass(frozen=True)
class Case:
    """Tensors by name, each with its source and its target side, and the machine graph."""

    tensors: Mapping[str, tuple[Side, Side]]
    topology: Topology | None
    verify: Verify
    shared_memory: SharedMemory


def share(whole: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    chunks = whole.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def cut(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The rank's local tensor, by `torch.chunk` alone."""
    for parts, index, placement in zip(layout.mesh.shape, layout.mesh.coordinate(rank), layout.placements, strict=True):
        match placement:
            case ours.Shard(dim):
                full = share(full, dim, parts, index)
            case ours.StridedShard(dim, factor):
                full = torch.cat([share(part, dim, parts, index) for part in full.chunk(factor, dim)], dim)
            case ours.BlockShard(dim, blocks):
                full = torch.cat([share(part, dim, parts, index) for part in full.split(blocks, dim)], dim)
    return full


def torch_placement(placement: ours.Placement) -> Any:
    match placement:
        case ours.Shard(dim):
            return Shard(dim)
        case ours.StridedShard(dim, factor):
            return _StridedShard(dim, split_factor=factor)
    return Replicate()


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Without process groups: nothing here communicates over the mesh."""
    ranks = torch.tensor(mesh.ranks).view(mesh.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes, _init_backend=False)


class Part:
    """One rank's part of a side, in a memory whose other elements must stay as they are."""

    def __init__(self, side: Side, expected: torch.Tensor, rank: int) -> None:
        memory = side.memory[rank]
        inner = sum((n - 1) * step for n, step in zip(expected.shape, memory.strides, strict=True))
        size = memory.offset + max(inner, 0) + 6
        self.memory = torch.full((size,), _UNTOUCHED, dtype=torch_dtype(side.dtype))
        self.local = self.memory.as_strided(expected.shape, memory.strides, memory.offset)
        self.expected = expected.to(self.memory.dtype)

    def problems(self) -> list[str]:
        found = [] if torch.equal(self.local, self.expected) else [f"{self.local} is not {self.expected}"]
        self.local.fill_(_UNTOUCHED)
        return found + ([] if bool((self.memory == _UNTOUCHED).all()) else ["guards were written"])


def given(side: Side, local: torch.Tensor | None, rank: int) -> torch.Tensor | Local | None:
    """The part as a user gives it; DTensors also where the rank is outside of their mesh."""
    layout = side.layout
    if side.kind == "dtensor":
        empty = torch.empty(0, dtype=torch_dtype(side.dtype))
        placements, mesh = [torch_placement(placement) for placement in layout.placements], device_mesh(layout.mesh)
        if local is not None:
            # `cut` is right: torch cuts so too.
            cuts = distribute_tensor(torch.empty(layout.shape), mesh, placements, src_data_rank=None).to_local()
            assert cuts.shape == local.shape
        return DTensor.from_local(
            empty if local is None else local,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=torch.empty(layout.shape, device="meta").stride(),
        )
    return None if local is None else Local(local, layout)


def any_case(rank: int, world_size: int, port: int, case: Case) -> list[str]:
    """Reshards; what is wrong afterwards on this rank."""
    in_group(rank, world_size, port)
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    parts: list[tuple[str, Part]] = []
    for name, pair in case.tensors.items():
        full = coordinate_tensor(name, pair[0].layout.shape, "float32")
        for index, side in enumerate(pair):
            part = None
            if rank in side.layout.mesh.ranks:
                part = Part(side, cut(full, side.layout, rank), rank)
                parts.append((f"{('source', 'target')[index]} {name}", part))
                if index == 0:
                    part.local.copy_(part.expected)
            holding = given(side, part and part.local, rank)
            if holding is not None:
                sides[index][name] = holding
    src, dst = ((side or None) for side in sides)
    settings = replace(SMALL, verify=case.verify, shared_memory=case.shared_memory)
    assert reshard(src, dst, topology=case.topology, settings=settings) is dst
    return [f"{name}: {problem}" for name, part in parts for problem in part.problems()]


def torchs_own_words(rank: int, world_size: int, port: int, ranks: tuple[Any, Any], placements: Any) -> bool:
    """DTensor to DTensor over real meshes; torch distributes the source and gathers both sides."""
    in_group(rank, world_size, port)
    full = torch.arange(13 * 6, dtype=torch.float32).view(13, 6)
    meshes = [DeviceMesh("cpu", torch.tensor(side)) for side in ranks]
    src = distribute_tensor(full, meshes[0], placements[0])
    dst = distribute_tensor(torch.zeros(13, 6), meshes[1], placements[1])
    reshard(src, dst)
    expected = [full] if meshes[1].get_coordinate() is None else [full, dst.full_tensor()]
    if meshes[0].get_coordinate() is not None:
        expected.append(src.full_tensor())
    return all(torch.equal(full, found) for found in expected)


def modules(rank: int, world_size: int, port: int) -> bool:
    """FSDP2's and tensor parallel's kind of state dict, with parameters that want gradients and whole buffers."""
    in_group(rank, world_size, port)
    torch.manual_seed(1)
    full = {"up": torch.rand(7, 4), "scale": torch.tensor(3.0)}
    data, model = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size,))
    src = {"up": torch.nn.Parameter(distribute_tensor(full["up"], data, [Shard(0)])), "scale": full["scale"]}
    dst = {
        "up": torch.nn.Parameter(distribute_tensor(torch.zeros(7, 4), model, [Shard(1)])),
        "scale": torch.zeros(()),
    }
    reshard(src, dst)
    gathered = dst["up"].full_tensor()
    return torch.equal(gathered, full["up"]) and torch.equal(dst["scale"], full["scale"])


def halves(rank: int, world_size: int, version: float = 1.0) -> tuple[Local | None, Local | None]:
    """Rows over ranks 0 and 1 to columns over ranks 1 and 2; the rest holds nothing."""
    rows = Layout((6, 8), Mesh.of(tp=2), (ours.Shard(0),))
    columns = Layout((6, 8), Mesh.of(first_rank=1, tp=2), (ours.Shard(1),))
    full = wanted(version)
    src = Local(cut(full, rows, rank).clone(), rows) if rank in rows.mesh.ranks else None
    dst = Local(torch.zeros(6, 4), columns) if rank in columns.mesh.ranks else None
    return src, dst


def wanted(version: float) -> torch.Tensor:
    return torch.arange(48.0).view(6, 8) + 100 * version


def is_delivered(dst: Local | None, rank: int, version: float = 1.0) -> bool:
    return dst is None or torch.equal(dst.tensor, cut(wanted(version), dst.layout, rank))


def works(rank: int, world_size: int) -> bool:
    """The group and a further call on it."""
    total = torch.ones(1)
    dist.all_reduce(total)
    src, dst = halves(rank, world_size)
    reshard(src, dst, settings=SMALL)
    return total.item() == world_size and is_delivered(dst, rank)


def repeated(rank: int, world_size: int, port: int, topology: Topology | None, versions: int) -> list[Any]:
    """One preparation, many runs with new source values; rank 0's planned bytes over the network."""
    in_group(rank, world_size, port)
    src, dst = halves(rank, world_size)
    found: list[Any] = []
    with Resharder.prepare(src, dst, topology=topology, settings=SMALL) as resharder:
        for version in range(versions):
            if src is not None:
                src.tensor.copy_(cut(wanted(version), src.layout, rank))
            report = resharder.run()
            assert is_delivered(dst, rank, version)
            if report is not None:
                found.append((report.summary.network_bytes, [part.role for part in report.ranks]))
    return found


def in_subgroup(rank: int, world_size: int, port: int) -> bool:
    """Only global ranks 4, 2 and 1 call, and meshes and topology go by global rank."""
    in_group(rank, world_size, port)
    members = [1, 2, 4]
    group = dist.new_group(members)
    if rank not in members:
        try:
            reshard(None, None, group=group)
        except TransferError as error:
            return "isn't in the given process group" in str(error)
        return False
    full = torch.arange(9.0)
    there, here = (Layout((9,), Mesh.from_ranks(("tp",), (2,), r), (ours.Shard(0),)) for r in ((4, 2), (2, 1)))
    src = Local(cut(full, there, rank), there) if rank in there.mesh.ranks else None
    dst = Local(torch.zeros(here.local_shape(rank)), here) if rank in here.mesh.ranks else None
    reshard(src, dst, group=group, topology=Topology.of(((1,), (2, 4))), settings=SMALL)
    return dst is None or torch.equal(dst.tensor, cut(full, here, rank))


def idle_ranks_plan_nothing(rank: int, world_size: int, port: int) -> bool:
    in_group(rank, world_size, port)
    src, dst = halves(rank, world_size)
    planner = "refit_transport.transports.nccl_reshard.plan_transfer"
    with mock.patch(planner, side_effect=AssertionError) if src is dst is None else mock.MagicMock():
        reshard(src, dst, settings=SMALL)
    return is_delivered(dst, rank)


def refused(rank: int, world_size: int, port: int, fault: str) -> tuple[str, str, float, bool]:
    """Calls with one fault somewhere: the error's kind and words, its seconds, whether all works afterwards."""
    in_group(rank, world_size, port)
    src, dst = halves(rank, world_size)
    settings = SMALL
    with _FAULTS[fault](rank) as change:
        src, dst, settings = change(src, dst, settings)
        began = time.monotonic()
        try:
            reshard(src, dst, settings=settings)
            kind, words = "", ""
        except Exception as error:  # noqa: BLE001 - the test looks at it
            kind, words = type(error).__name__, str(error)
        seconds = time.monotonic() - began
    dist.barrier()
    return kind, words, seconds, works(rank, world_size)


def _given(change: Callable[..., Any], on: Any) -> Callable[[int], Any]:
    """A fault in what ranks `on` give."""

    @contextmanager
    def fault(rank: int) -> Any:
        yield lambda src, dst, settings: (*change(src, dst), settings) if rank in on else (src, dst, settings)

    return fault


@contextmanager
def _late(rank: int) -> Any:
    """Rank 3, which holds nothing, comes when the others have given up."""
    if rank == 3:
        time.sleep(3.0)
    yield lambda src, dst, settings: (src, dst, RefitSettings(timeout_s=1.0))


@contextmanager
def _in_transfer(rank: int) -> Any:
    """Rank 1's fabric fails when the bytes are to move."""
    broken = mock.patch.object(GlooFabric, "run", side_effect=OSError("the cable is cut"))
    with broken if rank == 1 else mock.MagicMock():
        yield lambda src, dst, settings: (src, dst, settings)


def _hole(src: Local, dst: Local | None) -> Any:
    rows = Layout((6, 8), Mesh.of(tp=3), (ours.Shard(0),))
    return Local(torch.zeros(2, 8), rows), dst


_FAULTS: dict[str, Callable[[int], Any]] = {
    "hole": _given(_hole, {0, 1}),
    "missing name": _given(lambda src, dst: (src and {"w": src}, dst and {"w": dst, "v": dst}), range(5)),
    "other dtype": _given(lambda src, dst: (Local(src.tensor.to(torch.float16), src.layout), dst), {1}),
    "inconvertible": _given(lambda src, dst: (src, dst and Local(dst.tensor.to(torch.int64), dst.layout)), range(5)),
    "other shape": _given(lambda src, dst: (Local(src.tensor[:2], src.layout), dst), {0}),
    "no dst": _given(lambda src, dst: (src, None), {2}),
    "no src": _given(lambda src, dst: (None, dst), {0, 1}),
    "no tensor": _given(lambda src, dst: ({"w": 3}, dst), {0}),
    "not in mesh": _given(lambda src, dst: (halves(0, 5)[0], dst), {4}),
    "alias": _given(lambda src, dst: (src, Local(src.tensor.view(-1)[:24].view(6, 4), dst.layout)), {1}),
    "late": _late,
    "in transfer": _in_transfer,
}


def leftovers(rank: int, world_size: int, port: int, calls: int) -> tuple[int, int, int]:
    """Open files, threads and keys in the store that further calls leave behind."""
    in_group(rank, world_size, port)

    def counted() -> tuple[int, int, int]:
        gc.collect()
        dist.barrier()
        keys = dist.distributed_c10d._get_default_store().list_keys()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), sum("refit" in key for key in keys)  # noqa: PTH208

    works(rank, world_size)
    time.sleep(0.2)
    before = counted()
    for _ in range(calls):
        works(rank, world_size)
    time.sleep(0.2)
    after = counted()
    return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]
