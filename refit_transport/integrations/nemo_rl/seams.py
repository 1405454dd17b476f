"""Every place where we touch NeMo RL: what is there, what we do with it, and the check that it is as we know it.

`SEAMS` is the one list. What it names in the driver's process is checked by `check_seams`, which `install` runs before
it changes anything; attributes of workers, which exist only in their processes, are checked when these join a refit.
Names and parameters are those of NeMo RL's main branch of August 2026; nothing of its code is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from refit_transport.errors import SeamError

Use = Literal["replaced", "implemented", "called", "read"]


@dataclass(frozen=True, slots=True)
class Seam:
    """A function, class or attribute of NeMo RL.

    parameters: a function's, in order; None where it is none. use: "replaced" by ours, a method that we "implemented",
    one that we "called", or an attribute that we "read". optional: newer or older versions may lack it.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None
    use: Use
    why: str
    optional: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FACTORY = _names("policy generation generation_backend colocated train_cluster inference_cluster refit_buffer_size_gb")
_INTERFACES = "nemo_rl.weight_sync.interfaces"
_VLLM = "nemo_rl.models.generation.vllm.vllm_generation"
_GROUPS = "nemo_rl.distributed.worker_groups"

FACTORY = Seam(
    "nemo_rl.weight_sync.factory",
    "create_weight_synchronizer",
    _FACTORY,
    "replaced",
    "makes our synchronizer for nccl_reshard and vLLM ranks of their own",
)
FACTORY_COPIES = tuple(
    Seam(module, FACTORY.path, _FACTORY, "replaced", "the factory, imported by name", optional)
    for module, optional in (
        ("nemo_rl.weight_sync", False),
        ("nemo_rl.algorithms.grpo", False),
        ("nemo_rl.algorithms.distillation", True),
        ("nemo_rl.algorithms.single_controller_utils.setup", True),
    )
)
LIMITS = Seam(
    "nemo_rl.weight_sync.nccl_reshard_utils",
    "check_nccl_reshard_refit_support",
    ("master_config",),
    "replaced",
    "refuses what NeMo RL's own transport can't do; ours has other limits",
)
PPO_SETUP = Seam(
    "nemo_rl.algorithms.ppo",
    "setup",
    _names("master_config tokenizer dataset val_dataset processor"),
    "replaced",
    "refuses every refit_transport; ours is added after it",
)
GENERATION_CONFIG = Seam(
    "nemo_rl.models.generation",
    "configure_generation_config",
    _names("config tokenizer is_eval has_refit_draft_weights trains_mtp"),
    "replaced",
    "starts engines with dummy weights; ours proves layouts on the checkpoint's",
)
SYNCHRONIZER = Seam(_INTERFACES, "WeightSynchronizer", None, "implemented", "what the algorithms drive a refit by")
METHODS = (
    Seam(_INTERFACES, "WeightSynchronizer.init_communicator", ("self",), "implemented", "joins and plans"),
    Seam(
        _INTERFACES,
        "WeightSynchronizer.reconcile_communicator",
        ("self",),
        "implemented",
        "before each sync: membership may have changed",
        optional=True,
    ),
    Seam(_INTERFACES, "WeightSynchronizer.sync_weights", _names("self timer kv_scales"), "implemented", "runs a refit"),
    Seam(_INTERFACES, "WeightSynchronizer.is_stale", None, "implemented", "no refit has been complete since the last"),
    Seam(_INTERFACES, "WeightSynchronizer.shutdown", ("self",), "implemented", "leaves the refit"),
)
DRIVER = (
    Seam(_GROUPS, "RayWorkerGroup.workers", None, "read", "the policy's actors, by rank"),
    Seam(
        _GROUPS,
        "RayWorkerGroup.get_dp_leader_worker_idx",
        _names("self dp_shard_idx"),
        "called",
        "which actors hold a vLLM engine",
    ),
    Seam(_GROUPS, "RayWorkerGroup.dp_size", None, "read", "how many vLLM engines there are"),
    Seam(_VLLM, "VllmGeneration", None, "read", "worker_group, cfg, tp_size and pp_size of its instances"),
)
SEAMS: tuple[Seam, ...] = (
    FACTORY,
    *FACTORY_COPIES,
    LIMITS,
    PPO_SETUP,
    GENERATION_CONFIG,
    SYNCHRONIZER,
    *METHODS,
    *DRIVER,
)

POLICY_ATTRIBUTES = ("model", "cfg")
"""Of `MegatronPolicyWorker` and `DTensorPolicyWorker` (both generations) in their own processes."""
ENGINE_ATTRIBUTES = ("llm", "cfg")
"""Of `VllmGenerationWorker` and `VllmAsyncGenerationWorker` in theirs."""

_OURS = frozenset(each.path.partition(".")[2] for each in METHODS)


def check_seams() -> None:
    """Compares the installed NeMo RL with `SEAMS`.

    Raises:
        SeamError: NeMo RL isn't installed, or the first seam that isn't as expected.
    """
    for seam in SEAMS:
        found = find(seam)
        if found is None or seam.parameters is None:
            continue
        # What we put there ourselves has the signature of what it stands for.
        parameters = tuple(inspect.signature(inspect.unwrap(found)).parameters)
        if parameters != seam.parameters:
            expected = f"parameters ({', '.join(seam.parameters)}) instead of ({', '.join(parameters)})"
            raise seam_error(seam.name, expected)
    unknown = sorted(getattr(find(SYNCHRONIZER), "__abstractmethods__", frozenset()) - _OURS)
    if unknown:
        raise seam_error(SYNCHRONIZER.name, f"no other methods to implement than {sorted(_OURS)}: {unknown} are new")


def find(seam: Seam) -> Any:
    """What is at a seam; None where an optional one is missing.

    Raises:
        SeamError: the module or an attribute on the path doesn't exist.
    """
    try:
        found: Any = import_module(seam.module)
        for name in seam.path.split("."):
            found = inspect.getattr_static(found, name)
    except (ImportError, AttributeError) as error:
        if seam.optional:
            return None
        raise seam_error(seam.name, f"it to exist ({type(error).__name__}: {error})") from error
    return found


def replace_at(seam: Seam, replacement: Callable[..., Any]) -> None:
    """Puts `replacement` in the place of a function; nothing where an optional seam is missing."""
    if find(seam) is not None:
        setattr(import_module(seam.module), seam.path, replacement)


def required(worker: object, names: tuple[str, ...]) -> None:
    """Raises SeamError unless a NeMo RL worker has these attributes."""
    for name in names:
        if getattr(worker, name, None) is None:
            raise seam_error(f"{type(worker).__module__}:{type(worker).__name__}.{name}", "it to be set")


def seam_error(seam: str, expected: str) -> SeamError:
    """An error that names the installed NeMo RL and the place."""
    return SeamError("nemo-rl", installed_version(), seam, expected)


def source_folder() -> Path:
    """The folder that the installed NeMo RL's package is in: its checkout."""
    return Path(str(next(iter(import_module("nemo_rl").__path__)))).parent


def replaced_seams() -> Iterator[Seam]:
    """Those that `install` changes."""
    return (seam for seam in SEAMS if seam.use == "replaced")


def installed_version() -> str:
    """As NeMo RL says it of itself; words instead where it doesn't, or isn't installed."""
    try:
        return str(getattr(import_module("nemo_rl"), "__version__", "of unknown version"))
    except ImportError:
        return "(not installed; it is installed from source, not from PyPI)"
