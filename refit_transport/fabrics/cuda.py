"""What the NCCL fabrics need of torch: streams and events of one GPU, and a private process group.

Everything that touches CUDA or NCCL is behind the protocols here, so that the rest runs, and is tested, without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
from torch._C._distributed_c10d import Store

from refit_transport.errors import TransferError

# torch's watchdog ends work that is older than the group's own timeout. Ours must come first, and say which rank.
_WATCHDOG_FACTOR = 4
# Read by torch when the group is made. Its default ends the whole process when a peer dies; 2 only aborts the group.
# With blocking waits the host would wait for each group of messages before it starts the next.
_GROUP_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_BLOCKING_WAIT": "0"}


class Event(Protocol):
    """A point in a stream; `torch.cuda.Event` that keeps time."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Stream(Protocol):
    """An order of device work; `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None: ...


class Device(Protocol):
    """One accelerator."""

    def current_stream(self) -> Stream: ...
    def new_stream(self) -> Stream: ...
    def new_event(self) -> Event: ...
    def using(self, stream: Any) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """A GPU and two streams of it beside the caller's: packing and unpacking on one, messages on the other."""

    device: Device
    side: Stream
    wire: Stream

    @classmethod
    def of(cls, device: Device) -> Self:
        return cls(device, device.new_stream(), device.new_stream())

    def marked(self, stream: Stream) -> Event:
        """An event after everything that is on the stream."""
        event = self.device.new_event()
        event.record(stream)
        return event

    def follow_caller(self) -> None:
        """Both streams wait for what the caller's stream does now: the weights' last change comes first."""
        ready = self.marked(self.device.current_stream())
        self.side.wait_event(ready)
        self.wire.wait_event(ready)


class GroupWork(Protocol):
    """A group of messages under way; torch's `Work`."""

    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


class Group(Protocol):
    """A process group as its backend class shows it; torch's `ProcessGroupNCCL`."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any: ...
    def abort(self) -> None: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> Any: ...
    def _comm_ptr(self) -> int: ...


class CudaDevice:
    """Implements `Device` by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> Stream:
        """The stream that the caller's own work is on."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Stream:
        """A stream beside the current one."""
        stream: Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def new_event(self) -> Event:
        """An event whose distance to another can be asked."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside the block, work goes to the stream."""
        return torch.cuda.stream(stream)


def make_group(
    store: Store, *, rank: int, world_size: int, device: torch.device, timeout_s: float, backend: Any = None
) -> Group:
    """A private ProcessGroupNCCL, connected; collective. torch.distributed's default group is never touched.

    Args:
        store: a name space of its own.
        rank: this rank in the group.
        world_size: ranks of the group; each has a GPU of its own.
        device: this rank's GPU.
        timeout_s: of one refit, in seconds.
        backend: what has `ProcessGroupNCCL`; torch's own module when None.

    Raises:
        TransferError: NCCL can't connect.
    """
    from torch._C import _distributed_c10d

    module = _distributed_c10d if backend is None else backend
    # Messages go first where packing keeps the GPU busy.
    options = module.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=_WATCHDOG_FACTOR * timeout_s)
    options.group_name = "refit_transport"
    options.global_ranks_in_group = list(range(world_size))
    try:
        with _environment(_GROUP_ENVIRONMENT):
            group = module.ProcessGroupNCCL(store, rank, world_size, options)
        # Otherwise a communicator is made at the first message, for which then every rank would have to come.
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        raise TransferError(rank, -1, "connect", "", f"NCCL: {str(error).splitlines()[0]}") from error
    connected: Group = group
    return connected


def obstacles(buffers: Mapping[str, torch.device]) -> tuple[str, ...]:
    """Why NCCL can't move these buffers of this process (name: device); nothing where it can."""
    found = []
    if not torch.distributed.is_nccl_available():
        found.append(f"torch {torch.__version__} is built without NCCL")
    if not torch.cuda.is_available():
        found.append("it sees no CUDA device")
    elsewhere = sorted(name for name, device in buffers.items() if device.type != "cuda")
    if elsewhere:
        found.append(f"{len(elsewhere)} of its buffers are not on a GPU, such as {elsewhere[0]}")
    devices = sorted({str(device) for device in buffers.values() if device.type == "cuda"})
    if len(devices) > 1:
        found.append(f"its buffers are on several GPUs: {', '.join(devices)}")
    return tuple(found)


def gpu_of(devices: Iterable[torch.device]) -> torch.device:
    """The one GPU that the devices are, with its index."""
    device = next(iter(devices))
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def gpu_identity(device: torch.device) -> str:
    """Equal on two ranks only when they have the same GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
