"""What one GPU can show: packing and unpacking against the copy peak, their bytes, and a process group of one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from rich.console import Group
from rich.table import Table

from refit_transport.bench.isolation import Announce
from refit_transport.config.settings import MIB
from refit_transport.errors import ConfigError, Violation
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.cuda import CudaDevice, make_group
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.fabrics.program import Moves, Program, Step, lower
from refit_transport.fabrics.slots import Slots, SlotSizes
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.oracle import HeldSide, coordinate_tensor

_REPETITIONS = 7
_TIMEOUT_S = 120.0
Direction = Literal["pack", "unpack"]


@dataclass(frozen=True, slots=True)
class PackCase:
    """Tensors of one shape, in columns over two ranks on one side and over three on the other.

    So what rank 0 sends, and what the middle target receives from both, lies in parts of rows.
    """

    name: str
    shape: tuple[int, int]
    tensors: int
    source_dtype: str = "bfloat16"
    target_dtype: str = "bfloat16"
    bucket_bytes: int = 16 * MIB

    def manifests(self) -> tuple[Manifest, Manifest]:
        """Source ranks 0 and 1, target ranks 2 to 4."""
        names = [f"w{number}" for number in range(self.tensors)]
        halves = Layout(self.shape, Mesh.of(tp=2), (Shard(1),))
        thirds = Layout(self.shape, Mesh.of(first_rank=2, tp=3), (Shard(1),))
        return (
            manifest_from_layouts("source", dict.fromkeys(names, halves), dtype=self.source_dtype),
            manifest_from_layouts("target", dict.fromkeys(names, thirds), dtype=self.target_dtype),
        )


# On one GPU; the largest takes about a gigabyte for each side's half.
CASES = (
    PackCase("large matrices", (8192, 8192), 16),
    PackCase("float32 to bfloat16", (8192, 8192), 8, source_dtype="float32"),
    PackCase("many small tensors", (64, 64), 20_000),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Payload bytes per second of copies on the device. `share` is of the copy peak; `is_exact` says whether the bytes
    are those that the CPU packs or unpacks."""

    case: str
    direction: Direction
    nbytes: int
    seconds: float
    share: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class GpuResult:
    """What was measured. `copy_peak`: bytes per second of one large copy on the device, each read and written once."""

    device: str
    copy_peak: float
    rates: tuple[Rate, ...]
    connect_seconds: float
    refit_is_exact: bool

    @property
    def misses(self) -> list[str]:
        """A line for each thing that is wrong; rates have no limit."""
        lines = [
            f"{rate.case}: {rate.direction}: other bytes than on the CPU" for rate in self.rates if not rate.is_exact
        ]
        return lines if self.refit_is_exact else [*lines, "a refit from the GPU to itself: other bytes than were sent"]

    def to_json(self) -> dict[str, Any]:
        """A plain value for JSON."""
        return {**asdict(self), "misses": self.misses}


def measure_gpu(*, announce: Announce) -> GpuResult:
    """Measures on the current CUDA device.

    Raises:
        ConfigError: there is no CUDA device, or torch has no NCCL.
        TransferError: the process group can't be made.
    """
    check_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    announce("the copy peak")
    peak = copy_peak(device, nbytes=1 << 30)
    rates: list[Rate] = []
    for case in CASES:
        announce(f"packing: {case.name}")
        rates += measure_packing(case, device, peak=peak)
    announce("a process group of one rank")
    seconds, is_exact = measure_group(device)
    return GpuResult(torch.cuda.get_device_name(device), peak, tuple(rates), seconds, is_exact)


def check_gpu() -> None:
    """Raises ConfigError, with all that is missing, where nothing can be measured."""
    missing = []
    if not torch.cuda.is_available():
        remedy = "run it on a machine with an NVIDIA GPU, with a CUDA build of torch"
        missing.append(Violation("--gpu", "none", "needs a CUDA device", remedy))
    if not torch.distributed.is_nccl_available():
        got = f"torch {torch.__version__}"
        missing.append(Violation("--gpu", got, "needs a torch with NCCL", "install a CUDA build of torch"))
    if missing:
        raise ConfigError("bench", tuple(missing))


def copy_peak(device: torch.device, *, nbytes: int) -> float:
    """Bytes per second of one contiguous copy on the device."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return nbytes / _seconds(lambda: target.copy_(source), device)


def measure_packing(case: PackCase, device: torch.device, *, peak: float) -> tuple[Rate, ...]:
    """The rates of rank 0's packing and rank 3's unpacking in a whole refit, payload after payload."""
    held, wanted = case.manifests()
    schedule = build_schedule(
        plan_transfer(held, wanted), Topology.of(((0, 1), (2, 3, 4))), bucket_bytes=case.bucket_bytes
    )
    sizes = SlotSizes.of([schedule], staging_bytes=16 * case.bucket_bytes)
    return (
        _rate(case, "pack", schedule, held, sizes, device, peak),
        _rate(case, "unpack", schedule, wanted, sizes, device, peak),
    )


def _rate(
    case: PackCase,
    direction: Direction,
    schedule: Schedule,
    manifest: Manifest,
    sizes: SlotSizes,
    device: torch.device,
    peak: float,
) -> Rate:
    there, here = (_program(schedule, manifest, sizes, place) for place in (device, torch.device("cpu")))
    seconds = _seconds(partial(_make, there, direction), device)
    nbytes = sum(step.nbytes for step in there.steps if _moves(step, direction).into)
    exact = _equal(there, here, direction)
    return Rate(case.name, direction, nbytes, seconds, nbytes / seconds / peak, exact)


def measure_group(device: torch.device) -> tuple[float, bool]:
    """Seconds to make a group of one rank, and whether a refit to itself through its fabric is exact."""
    from torch.distributed import HashStore

    began = time.perf_counter()
    group = make_group(HashStore(), rank=0, world_size=1, device=device, timeout_s=_TIMEOUT_S)
    seconds = time.perf_counter() - began
    memory = torch.empty(MIB, dtype=torch.uint8, device=device)
    fabric = NcclFabric(group, device=CudaDevice(device), rank=0, memory=memory, failure=lambda: None)
    try:
        return seconds, _refit_to_itself(fabric, device)
    finally:
        fabric.close()


def _refit_to_itself(fabric: NcclFabric, device: torch.device) -> bool:
    whole = Layout((512, 512), Mesh.of(dp=1), (Replicate(),))
    source, target = (manifest_from_layouts(role, {"w": whole}, dtype="float32") for role in ("source", "target"))
    tensors = {"w": coordinate_tensor("w", (512, 512), "float32")}
    held, wanted = (
        _on(HeldSide.of(side, full).bindings[0], device) for side, full in ((source, tensors), (target, None))
    )
    schedule = build_schedule(plan_transfer(source, target), Topology.of(((0,),)), bucket_bytes=MIB)
    sizes = SlotSizes.of([schedule], staging_bytes=MIB)
    program = lower(schedule, 0, source=held, target=wanted, memory=fabric.memory, sizes=sizes)
    fabric.run(program, deadline=Deadline(_TIMEOUT_S))
    return torch.equal(wanted.view(0).cpu(), tensors["w"])


def render_gpu(result: GpuResult) -> Group:
    """The rates beside the copy peak, and the group."""
    table = Table(title=f"{result.device}: copy peak {result.copy_peak / 1e9:.0f} GB/s", title_justify="left")
    for column in ("case", "direction", "MB", "GB/s", "of the peak", "bytes"):
        table.add_column(column)
    for rate in result.rates:
        speed, share = f"{rate.nbytes / rate.seconds / 1e9:.0f}", f"{rate.share:.0%}"
        exact = "equal" if rate.is_exact else "WRONG"
        table.add_row(rate.case, rate.direction, f"{rate.nbytes / 1e6:.0f}", speed, share, exact)
    refit = "exact" if result.refit_is_exact else "WRONG"
    return Group(table, f"process group of one rank: {result.connect_seconds:.2f} s; refit to itself: {refit}")


def _program(schedule: Schedule, manifest: Manifest, sizes: SlotSizes, device: torch.device) -> Program:
    """The program of a side's rank on a device, on weights of the same values everywhere."""
    ranked = next(ranked for ranked in manifest.ranks if ranked.rank in (0, 3))
    tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in manifest.tensors}
    binding = _on(HeldSide.of(Manifest.of((ranked,)), tensors).bindings[ranked.rank], device)
    source, target = (binding, None) if ranked.role == "source" else (None, binding)
    # Equal bytes where nothing was packed: unpacking reads what a peer would have sent.
    memory = Slots(torch.arange(sizes.nbytes, device=device).to(torch.uint8) % 100)
    return lower(schedule, ranked.rank, source=source, target=target, memory=memory, sizes=sizes)


def _on(binding: Binding, device: torch.device) -> Binding:
    return Binding.of(binding.manifest, {name: buffer.to(device) for name, buffer in binding.buffers.items()})


def _moves(step: Step, direction: Direction) -> Moves:
    return step.pack if direction == "pack" else step.unpack


def _make(program: Program, direction: Direction) -> None:
    for step in program.steps:
        _moves(step, direction).make()


def _equal(there: Program, here: Program, direction: Direction) -> bool:
    """Whether each step, made on both, leaves the same bytes where it copied to."""
    for one, other in zip(there.steps, here.steps, strict=True):
        moves = [_moves(step, direction) for step in (one, other)]
        for move in moves:
            move.make()
        pairs = zip(*(move.into for move in moves), strict=True)
        if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs):
            return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Values that aren't numbers are equal to nothing, themselves included.
    return tensor.cpu().contiguous().view(torch.uint8)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """The median of several calls, after one that isn't counted."""
    times: Sequence[float] = [_once(function, device) for _ in range(_REPETITIONS + 1)]
    return statistics.median(times[1:])


def _once(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
