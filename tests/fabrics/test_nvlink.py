"""NVML's answers as NVLink domains, with a library of our own in the place of the driver's."""

from __future__ import annotations

import ctypes

import pytest

from refit_transport.fabrics.nvlink import GpuFabric, nvlink_domain, read_gpu_fabric

CLUSTER = bytes(range(1, 17))


class Library:
    """Knows one GPU, of clique 5; `fails` names a function that returns an error, `lacks` one that isn't there."""

    def __init__(self, *, fails="", lacks=""):
        self.fails, self.lacks, self.opened = fails, lacks, 0

    def __getattr__(self, name):
        if name == self.lacks:
            raise AttributeError(name)
        calls = {
            "nvmlInit_v2": self._open,
            "nvmlShutdown": self._close,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetGpuFabricInfo": self._fabric,
        }
        return (lambda *_: 999) if name == self.fails else calls[name]

    def _open(self):
        self.opened += 1
        return 0

    def _close(self):
        self.opened -= 1
        return 0

    def _handle(self, uuid, device):
        device._obj.value = 77
        return 0 if uuid == b"GPU-abc" else 6

    def _fabric(self, device, info):
        # By hand, as the header lays it out: 16 bytes of id, status, clique, one byte of state.
        raw = CLUSTER + (0).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes([3])
        assert device.value == 77
        assert ctypes.sizeof(info._obj) == 28
        ctypes.memmove(info, raw, len(raw))
        return 0


def read(library, gpu="abc"):
    return read_gpu_fabric(gpu, load=lambda name: library)


def test_the_fields_are_read_where_the_library_puts_them():
    library = Library()
    assert read(library) == GpuFabric(CLUSTER, 5, state=3, status=0)
    assert library.opened == 0


@pytest.mark.parametrize(
    "trouble",
    [
        {"fails": "nvmlInit_v2"},
        {"fails": "nvmlDeviceGetHandleByUUID"},
        {"fails": "nvmlDeviceGetGpuFabricInfo"},
        {"lacks": "nvmlDeviceGetGpuFabricInfo"},
    ],
)
def test_a_library_that_cannot_tell_tells_nothing_and_is_closed(trouble):
    library = Library(**trouble)
    assert read(library) is None
    assert library.opened == 0


def test_an_unknown_gpu_and_no_library():
    assert read(Library(), gpu="other") is None
    assert read_gpu_fabric("abc", load=missing) is None


def missing(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("fabric", "domain"),
    [
        (GpuFabric(CLUSTER, 5, state=3, status=0), f"{CLUSTER.hex()}/5"),
        (GpuFabric(CLUSTER, 6, state=3, status=0), f"{CLUSTER.hex()}/6"),
        (GpuFabric(CLUSTER, 5, state=2, status=0), ""),
        (GpuFabric(CLUSTER, 5, state=3, status=1), ""),
        (GpuFabric(bytes(16), 5, state=3, status=0), ""),
        (None, ""),
    ],
)
def test_only_a_complete_fabric_with_an_id_reaches_beyond_the_host(fabric, domain):
    assert nvlink_domain("abc", read=lambda gpu: fabric) == domain


def test_here_without_the_driver_it_is_the_host():
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert nvlink_domain("abc") == ""
    else:
        pytest.skip("this machine has NVIDIA's driver")
