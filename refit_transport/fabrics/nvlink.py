"""Which NVLink domain a GPU belongs to, in the words of NVIDIA's management library (NVML).

GPUs of one rack-scale NVLink domain (an NVL72) have one cluster id and one clique id, whichever host they are in. The
library comes with the driver and is loaded only when somebody asks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
# The GPU has joined its fabric. 0 to 2: there is none, it hasn't begun, it is joining.
_COMPLETED = 3


@dataclass(frozen=True, slots=True)
class GpuFabric:
    """What NVML says of one GPU's fabric: the domain's id (16 bytes), the clique inside it, state and return code."""

    cluster: bytes
    clique: int
    state: int
    status: int


FabricReader = Callable[[str], GpuFabric | None]


def nvlink_domain(gpu: str, *, read: FabricReader | None = None) -> str:
    """An id that is equal on two GPUs exactly when NVLink joins them across hosts; "" where it ends at the host.

    Args:
        gpu: the GPU's uuid, without the prefix "GPU-".
        read: asks for a GPU's fabric; NVML unless given.

    >>> nvlink_domain("a", read=lambda gpu: GpuFabric(bytes(15) + bytes([7]), 2, state=3, status=0))
    '00000000000000000000000000000007/2'
    >>> nvlink_domain("a", read=lambda gpu: None)
    ''
    """
    found = (read or read_gpu_fabric)(gpu)
    if found is None or found.state != _COMPLETED or found.status != _SUCCESS:
        return ""
    # An 8-GPU server may say "completed" too; only where hosts share a domain it has an id.
    return f"{found.cluster.hex()}/{found.clique}" if any(found.cluster) else ""


class _FabricInfo(ctypes.Structure):
    """NVML's `nvmlGpuFabricInfo_t`."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def read_gpu_fabric(gpu: str, *, load: Callable[[str], Any] = ctypes.CDLL) -> GpuFabric | None:
    """NVML's answer for a GPU; None without the library, or with one that is too old to be asked."""
    try:
        library = load(_LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2() != _SUCCESS:
        return None
    try:
        return _ask(library, gpu)
    except AttributeError:  # no such function in the library
        return None
    finally:
        library.nvmlShutdown()


def _ask(library: Any, gpu: str) -> GpuFabric | None:
    device, info = ctypes.c_void_p(), _FabricInfo()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode(), ctypes.byref(device)) != _SUCCESS:
        return None
    if library.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)) != _SUCCESS:
        return None
    return GpuFabric(bytes(info.cluster), info.clique, info.state, info.status)
