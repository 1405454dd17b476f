"""The `vllm.general_plugins` entry point; vLLM calls `register` in each of its processes, sometimes more than once.

Environment variables that are read here, and nowhere else:

- `REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS=1`: plain-weights mode (CPU only, see `vllm_plain_weights`). Default: off.
- `REFIT_TRANSPORT_VLLM_ENDS_WITH=PID`: an engine's process that this process started ends with it, however that ends.
  Default: vLLM's own way, by which an engine outlives a killed parent.
- `VLLM_DIST_IDENT`, `MASTER_ADDR`, `MASTER_PORT` (set by vLLM and by the launcher): name the shared memory of a tensor
  parallel group on CPU.
"""

from __future__ import annotations

import _posixshmem
import contextlib
import ctypes
import logging
import os
import re
import signal
from typing import Any

import torch

from refit_transport.compatibility import require
from refit_transport.errors import SeamError, UnsupportedVersionError
from refit_transport.integrations.vllm_plain_weights import use_plain_weights
from refit_transport.integrations.vllm_seams import attribute, require_parameters, seam_error

ENGINE = "refit_transport"
PLAIN_WEIGHTS = "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS"
ENDS_WITH = "REFIT_TRANSPORT_VLLM_ENDS_WITH"
_PR_SET_PDEATHSIG = 1
_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
_FACTORY = "vllm.distributed.weight_transfer.factory"
_WORKER = "vllm.v1.worker.gpu_worker"


def register() -> None:
    """Makes this process's vLLM ready for refits. Idempotent.

    vLLM calls it wherever this package is installed too. Of an unsupported version nothing is touched; whoever then
    asks for our engine gets the error.

    Raises:
        SeamError: vLLM isn't as we know it at a place that we extend.
    """
    try:
        require("vllm", needed_for="the vLLM plugin")
    except UnsupportedVersionError as error:
        logging.getLogger(__name__).warning("refits are not available: %s", error)
        _refuse_when_used(error)
        return
    is_cpu = attribute("vllm.platforms", "current_platform").is_cpu()
    if is_cpu:
        _permit_amx()
        _name_shared_memory_by_job()
        _unlink_shared_memory_once_mapped()
    _register_engine()
    _end_with_parent()
    _prepare_joining()
    plain = os.environ.get(PLAIN_WEIGHTS, "")
    if plain not in ("", "0", "1"):
        raise ValueError(f"{PLAIN_WEIGHTS} must be 0 or 1 (got {plain!r})")
    if plain == "1":
        use_plain_weights()


def _refuse_when_used(error: UnsupportedVersionError) -> None:
    def refuse() -> Any:
        raise error

    with contextlib.suppress(SeamError):
        registry = getattr(attribute(_FACTORY, "WeightTransferEngineFactory"), "_registry", None)
        if isinstance(registry, dict):
            registry[ENGINE] = refuse


def _end_with_parent() -> None:
    """Asks the kernel to end this process with the thread that started it, if it is the one that was told to."""
    if os.environ.get(ENDS_WITH) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _permit_amx() -> None:
    """Asks the kernel for the AMX tile registers.

    vLLM chooses AMX kernels by what the CPU has, but a process dies of SIGILL at the first one unless it has asked;
    a spawned worker starts without the permission.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logging.getLogger(__name__).warning("the CPU has AMX, but the kernel refuses its use: bfloat16 may crash")


def _register_engine() -> None:
    factory = attribute(_FACTORY, "WeightTransferEngineFactory")
    registry = getattr(factory, "_registry", None)
    if not isinstance(registry, dict):
        raise seam_error(f"{_FACTORY}:WeightTransferEngineFactory._registry", "a dict of engines by name")
    if ENGINE not in registry:
        factory.register_engine(ENGINE, "refit_transport.integrations.vllm_engine", "RefitTransportEngine")


def _prepare_joining() -> None:
    """Shows our engine the model that drafts, which vLLM makes engines without; and ends an update that failed.

    A refit that failed elsewhere leaves vLLM's update open, and vLLM would refuse to start the next one.
    """
    owner = attribute(_WORKER, "Worker")
    original = owner.init_weight_transfer_engine
    if getattr(original, "prepares", False):
        return
    require_parameters(original, f"{_WORKER}:Worker.init_weight_transfer_engine", ("self", "init_info"))
    attribute(_WORKER, "Worker.get_draft_model")

    def init_weight_transfer_engine(self: Any, init_info: dict[str, Any]) -> None:
        if hasattr(self.weight_transfer_engine, "draft_with"):
            if not hasattr(self, "_weight_update_active"):
                raise seam_error(f"{_WORKER}:Worker._weight_update_active", "the flag of an open weight update")
            self._weight_update_active = False
            self.weight_transfer_engine.draft_with(self.get_draft_model())
        original(self, init_info)

    init_weight_transfer_engine.prepares = True  # type: ignore[attr-defined]
    owner.init_weight_transfer_engine = init_weight_transfer_engine


def _name_shared_memory_by_job() -> None:
    """Gives two jobs on one host different shared memory when an outside launcher starts the ranks.

    vLLM names it by the port in its init method; with `env://` there is none, and jobs collide.
    """
    owner = attribute(_COMMUNICATOR, "_CPUSHMDistributed")
    original = owner.make_group_name
    if getattr(original, "names_job", False):
        return
    require_parameters(original, f"{_COMMUNICATOR}:_CPUSHMDistributed.make_group_name", ("communicator",))

    def make_group_name(communicator: Any) -> str:
        return _with_job(str(original(communicator)))

    make_group_name.names_job = True  # type: ignore[attr-defined]
    owner.make_group_name = staticmethod(make_group_name)


def _unlink_shared_memory_once_mapped() -> None:
    """Lets the shared memory of groups and message queues vanish with its last process, however that ends.

    vLLM unlinks it only when its owner is destroyed in order; a killed worker would leave it for ever. When a group or
    a queue is ready, every rank has mapped every segment, and the names are not needed again.
    """
    _unlink_group_segments()
    _unlink_queue_segments()


def _unlink_group_segments() -> None:
    owner = attribute(_COMMUNICATOR, "_CPUSHMDistributed")
    original = owner._init_cpu_shm
    if getattr(original, "unlinks", False):
        return
    require_parameters(original, f"{_COMMUNICATOR}:_CPUSHMDistributed._init_cpu_shm", ("self",))

    def _init_cpu_shm(self: Any) -> Any:
        handle = original(self)
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(f"/{self.group_name}_{self.communicator.rank}")
        return handle

    _init_cpu_shm.unlinks = True  # type: ignore[attr-defined]
    owner._init_cpu_shm = _init_cpu_shm


def _unlink_queue_segments() -> None:
    owner = attribute(_QUEUE, "MessageQueue")
    original = owner.wait_until_ready
    if getattr(original, "unlinks", False):
        return
    require_parameters(original, f"{_QUEUE}:MessageQueue.wait_until_ready", ("self",))

    def wait_until_ready(self: Any) -> None:
        original(self)
        ring: Any = getattr(self, "buffer", None)
        if getattr(ring, "is_creator", False):
            ring.shared_memory.unlink()
            ring.is_creator = False

    wait_until_ready.unlinks = True  # type: ignore[attr-defined]
    owner.wait_until_ready = wait_until_ready


def _with_job(group_name: str) -> str:
    identifier = os.environ.get("VLLM_DIST_IDENT", "")
    if re.search(r"\w", identifier):
        return group_name
    job = f"{os.environ.get('MASTER_ADDR', '')}-{os.environ.get('MASTER_PORT', '')}"
    # A slash would name a directory of the shared memory file system.
    return re.sub(r"[^\w.:\[\]-]", "_", f"{job}-{group_name.removeprefix(identifier)}")
