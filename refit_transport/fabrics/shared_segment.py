"""Memory that ranks of one host share: a segment without a name, and who can share one."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
import uuid
from pathlib import Path
from weakref import finalize

import numpy as np
import torch

from refit_transport.errors import TransferError

REMEDY = "shared_memory: off exchanges over TCP instead"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Equal on two ranks only when they can exchange through shared memory.

    They need one running kernel, one user, and one temporary directory for their sockets. The directory counts by path,
    device and inode rather than by mount namespace: `ip netns exec` gives every process a mount namespace of its own,
    and containers of one host may or may not share a directory. When in doubt two ranks differ, and use TCP.
    """
    directory = Path(tempfile.gettempdir()).resolve()
    status = directory.stat()
    # Where there is no boot id, the hardware address; where there is none either, a random number: nobody shares.
    kernel = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"{uuid.getnode():x}"
    place = f"{directory} {status.st_dev:x}:{status.st_ino:x}"
    return f"{socket.gethostname()} {kernel} uid {os.geteuid()} {place}"


class SlotMemory:
    """One rank's segment of `nbytes`, in which its message slots lie; peers map it by its descriptor.

    It has no name anywhere, so it ends with the last process that maps it. Its pages cost memory once they are written.

    Raises:
        TransferError: the system gives no such memory.
    """

    def __init__(self, nbytes: int, *, rank: int) -> None:
        self.nbytes, self._rank = nbytes, rank
        try:
            self.descriptor = _nameless_file(max(1, nbytes))  # an empty file can't be mapped
            try:
                mapping = mmap.mmap(self.descriptor, max(1, nbytes))
            except BaseException:
                os.close(self.descriptor)
                raise
        except (OSError, OverflowError, ValueError) as error:
            reason = f"shared memory: no segment of {nbytes} bytes: {error}; {REMEDY}"
            raise TransferError(rank, -1, "connect", "", reason) from error
        # A segment that nobody closed, say because the connect failed, closes like any file: with its last reference.
        self._let_go = finalize(self, os.close, self.descriptor)
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The whole segment, uint8 [nbytes]."""
        if self._tensor is None:
            raise TransferError(self._rank, -1, "transfer", "", "shared memory: the segment is closed")
        return self._tensor

    def close(self) -> None:
        """Lets go of the segment, which stays mapped as long as any view of it lives; a second call does nothing."""
        self._tensor = None
        self._let_go()


def map_segment(descriptor: int, nbytes: int) -> torch.Tensor:
    """A peer's segment, uint8 [nbytes], read only: writing there ends the process. Keeps no hold of `descriptor`.

    Raises:
        OSError: it can't be mapped.
        ValueError: the file is shorter than `nbytes`.
    """
    mapping = mmap.mmap(descriptor, max(1, nbytes), access=mmap.ACCESS_READ)
    # torch warns about every buffer that it can't write to, so it gets the address; the array's life is the mapping's.
    array = (ctypes.c_ubyte * len(mapping)).from_address(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
    array.mapping = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)[:nbytes]


def _nameless_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("refit-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        descriptor, path = tempfile.mkstemp(prefix="refit-slots-")
        Path(path).unlink()
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "memfd_create"):
            # A peer that touches memory beyond the end of a file gets SIGBUS: the size is final.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
