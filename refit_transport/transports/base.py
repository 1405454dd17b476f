"""The protocol of a transport: a strategy that delivers a set of tensors at each refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from refit_transport.config.settings import RefitSettings
from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Binding
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.scheduling.schedule import Traffic
from refit_transport.scheduling.topology import Topology
from refit_transport.sources.base import Source
from refit_transport.targets.base import Target


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same on every rank: both manifests, topology and settings."""

    source: Manifest
    target: Manifest
    topology: Topology
    settings: RefitSettings

    @property
    def ranks(self) -> tuple[int, ...]:
        """All refit ranks, ascending."""
        return tuple(sorted(ranked.rank for side in (self.source, self.target) for ranked in side.ranks))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank's live side: a source or a target, with the manifest that it published."""

    rank: int
    manifest: RankManifest
    source: Source | None = None
    target: Target | None = None

    def source_binding(self) -> Binding | None:
        """The manifest bound to the source's current buffers; None on a target rank."""
        return None if self.source is None else Binding.of(self.manifest, self.source.buffers())

    def target_binding(self) -> Binding | None:
        """The manifest bound to the target's current buffers; None on a source rank."""
        return None if self.target is None else Binding.of(self.manifest, self.target.buffers())


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transport needs for one refit: messages of all ranks, and extra memory of each rank, in bytes at most."""

    messages: int
    staging_bytes: Mapping[int, int]


class Transport(Protocol):
    """Constructed on every rank with the same job and tensors: `Class(job, tensors)`; that part is pure.

    A class named in `refit_transport: module:Class` or in the entry point group `refit_transport.transports` has this
    shape too.
    """

    def __init__(self, job: Job, tensors: tuple[str, ...]) -> None:
        """Plans and schedules the delivery of these canonical tensors."""

    def digest(self) -> str:
        """Equal on every rank that planned the same."""

    def traffic(self) -> Traffic:
        """The payload bytes that one refit moves, by rank."""

    def check(self) -> None:
        """Proves from the manifests that every element is delivered once. Slow; for previews and tests.

        Raises:
            PlanError: naming tensor, box and rank.
        """

    def footprint(self) -> Footprint:
        """What one refit needs besides the weights themselves."""

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """Delivers once. Collective: every rank of the job calls it, between its target's `begin` and `finish`."""
