"""What is simulated: a model between two layouts on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.presets.rows import Group
from refit_transport.scheduling.topology import Topology
from refit_transport.simulation.catalog import CatalogModel, System, find_model, find_system
from refit_transport.simulation.presets import preset_manifests

# What `coverage: ffn` sends shard-to-shard.
FFN_GROUPS: frozenset[Group] = frozenset({"ffn", "expert_ffn", "shared_expert"})


@dataclass(frozen=True, slots=True)
class Ask:
    """What a user asks for. Layouts as in `layout.presets.sizes`; numbers of ranks are as few as needed when None.

    `domain` overrides the number of GPUs of the system that have fast links to each other. `tensors` is a glob over
    canonical names.
    """

    model: str
    source: str
    target: str
    system: str
    sources: int | None = None
    targets: int | None = None
    domain: int | None = None
    dtype: str = "bfloat16"
    tensors: str = "*"


@dataclass(frozen=True, slots=True)
class Case:
    """Both sides, the machine and the names that are moved; `ffn` are those of FFN projections."""

    ask: Ask
    model: CatalogModel
    system: System
    source: Manifest
    target: Manifest
    topology: Topology
    names: tuple[str, ...]
    ffn: frozenset[str]

    @classmethod
    def of(cls, ask: Ask) -> Self:
        """Looks up, describes both sides and lays the ranks out.

        Raises:
            ConfigError: an unknown model or system, layouts that can't be read or don't fit, or no tensor left.
        """
        system, model = find_system(ask.system), find_model(ask.model)
        source, target = preset_manifests(
            ask.model, source=ask.source, target=ask.target, sources=ask.sources, targets=ask.targets, dtype=ask.dtype
        )
        moved = [tensor for tensor in model.model.main if fnmatchcase(tensor.name, ask.tensors)]
        if not moved:
            reason = f"matches no tensor of {model.name}"
            raise ConfigError("simulate", (Violation("tensors", repr(ask.tensors), reason, ""),))
        names = tuple(tensor.name for tensor in moved)
        ffn = frozenset(tensor.name for tensor in moved if tensor.group in FFN_GROUPS)
        topology = machine(system, sizes=(len(source.ranks), len(target.ranks)), domain=ask.domain or system.domain)
        return cls(ask, model, system, source, target, topology, names, ffn)

    @property
    def bytes(self) -> int:
        """One copy of everything that is moved."""
        sizes = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}
        by_name = {tensor.name: tensor.numel for tensor in self.model.model.main}
        return sum(by_name[name] for name in self.names) * sizes[self.ask.dtype]


def machine(system: System, *, sizes: Sequence[int], domain: int) -> Topology:
    """Ranks in order, one side after the other; each side begins a new domain, and every rank has its own NIC.

    >>> from refit_transport.simulation.catalog import find_system
    >>> machine(find_system("dgx-h100"), sizes=(12, 8), domain=8).domains[1:]
    ((8, 9, 10, 11), (12, 13, 14, 15, 16, 17, 18, 19))
    """
    return Topology.of(_domains(sizes, domain), nics="rank", nic_rate=system.nic_rate, local_rate=system.local_rate)


def _domains(sizes: Sequence[int], domain: int) -> Iterator[range]:
    first = 0
    for size in sizes:
        for start in range(first, first + size, domain):
            yield range(start, min(start + domain, first + size))
        first += size
