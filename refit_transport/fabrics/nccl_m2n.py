"""NCCL M2N (the package nccl-extensions) for the tensors that it can move whole, messages for the others."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from refit_transport.errors import LayoutError, MissingDependencyError, TransferError
from refit_transport.fabrics.base import Spent
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.fabrics.program import Program
from refit_transport.fabrics.slots import Slots
from refit_transport.layout.box import Box
from refit_transport.planning.native import NativeSide, NativeTensor
from refit_transport.views import torch_dtype

# What nccl-extensions 0.2 is built for.
_LEAST_NCCL = (2, 30, 5)


@dataclass(frozen=True, slots=True)
class NativeMove:
    """A tensor to move and this rank's live parts of it; None on a side that it isn't in."""

    tensor: NativeTensor
    source: torch.Tensor | None
    target: torch.Tensor | None

    @classmethod
    def of(cls, tensor: NativeTensor, *, source: Binding | None, target: Binding | None) -> NativeMove:
        """Binds a tensor to this rank's memory."""
        return cls(tensor, _dense(tensor, source), _dense(tensor, target))


def load_m2n() -> ModuleType:
    """The module `nccl.m2n`.

    Raises:
        MissingDependencyError: it isn't installed, or can't be loaded here.
    """
    try:
        return importlib.import_module("nccl.m2n")
    except (ImportError, OSError) as error:
        raise MissingDependencyError("nccl-extensions", "fabric nccl_m2n", "nccl") from error


def m2n_obstacles() -> tuple[str, ...]:
    """Why NCCL M2N can't be used by this process; nothing where it can. Those of NCCL itself are not repeated."""
    found = []
    try:
        load_m2n()
    except MissingDependencyError as error:
        found.append(str(error))
    if torch.distributed.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < _LEAST_NCCL:
            have, need = (".".join(map(str, numbers)) for numbers in (version, _LEAST_NCCL))
            found.append(f"torch runs NCCL {have}, NCCL M2N needs {need}")
    return tuple(found)


class NcclM2nFabric:
    """An NCCL fabric whose group also runs native collectives. Every rank of the group makes the same calls."""

    def __init__(self, messages: NcclFabric, m2n: Any) -> None:
        self._messages, self._m2n = messages, m2n
        self._handle: Any = m2n.init()

    @property
    def memory(self) -> Slots:
        """See `Fabric.memory`."""
        return self._messages.memory

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        """See `Fabric.run`."""
        return self._messages.run(program, deadline=deadline)

    def reshard(self, moves: Iterable[NativeMove], *, deadline: Deadline) -> Spent:
        """Moves tensors, all in one group of calls. Collective over all ranks, whether or not they hold any of them.

        It ends when they have arrived: the library may use the communicator in ways that messages mustn't meet.
        `network` is the host's wait for all of it; what the library sends is not counted.

        Raises:
            TransferError: as `Fabric.run`.
        """
        spent = Spent()
        try:
            self._reshard(tuple(moves), spent, deadline)
        except BaseException:
            # Its work may never end, and it must be over before a handle is given back: so this one is kept.
            self._handle = None
            raise
        return spent

    def close(self) -> None:
        """See `Fabric.close`. The library lets go of the communicator before it ends."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.destroy()
        self._messages.close()

    def _reshard(self, moves: tuple[NativeMove, ...], spent: Spent, deadline: Deadline) -> None:
        streams = self._messages.streams
        with self._messages.guarded(deadline) as (group, guard), spent.timing("network"):
            streams.follow_caller()
            try:
                communicator = group._comm_ptr()
                with self._m2n.group():
                    for move in moves:
                        self._call(move, communicator)
            except (RuntimeError, ValueError, TypeError) as error:
                raise guard.failed(self._messages.rank, "NCCL M2N: " + str(error).splitlines()[0]) from error
            done = streams.marked(streams.side)
            if not guard.wait_until(done.query):
                raise guard.failed(self._messages.rank, "")
            streams.device.current_stream().wait_event(done)
        spent.received_bytes += sum(move.target.nbytes for move in moves if move.target is not None)

    def _call(self, move: NativeMove, communicator: int) -> None:
        tensor = move.tensor
        dtype = torch_dtype(tensor.dtype)
        # Ranks outside of a side describe it too: each rank derives the whole transfer.
        self._m2n.reshard(
            move.source,
            move.target,
            communicator,
            self._messages.streams.side,
            src_mesh=self._mesh(tensor.source),
            src_placements=self._placements(tensor.source),
            src_local_shape=tensor.source.local_shape,
            src_dtype=dtype,
            dst_mesh=self._mesh(tensor.target),
            dst_placements=self._placements(tensor.target),
            dst_local_shape=tensor.target.local_shape,
            dst_dtype=dtype,
            handle=self._handle,
        )

    def _mesh(self, side: NativeSide) -> Any:
        return self._m2n.Mesh(side.mesh, start_rank=side.first_rank)

    def _placements(self, side: NativeSide) -> list[Any]:
        return [self._m2n.Replicate() if dim is None else self._m2n.Shard(dim) for dim in side.cuts]


def _dense(tensor: NativeTensor, binding: Binding | None) -> torch.Tensor | None:
    parts = [] if binding is None else binding.parts(tensor.name, Box.full(tensor.shape))
    if not parts:
        return None
    if len(parts) > 1 or not parts[0].view.is_contiguous():
        rank = -1 if binding is None else binding.manifest.rank
        raise LayoutError(tensor.name, rank, "one dense block of memory", "parts of it")
    return parts[0].view


def require_native(fabric: object, rank: int) -> NcclM2nFabric:
    """The fabric, which must be able to move native tensors.

    Raises:
        TransferError: it isn't one that can.
    """
    if not isinstance(fabric, NcclM2nFabric):
        raise TransferError(rank, -1, "transfer", "", "a plan for fabric nccl_m2n needs that fabric")
    return fabric
