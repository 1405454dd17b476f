"""The protocol of a transport: a strategy that delivers a set of tensors at each refit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.layout.manifest import Manifest, RankManifest, RankRole
from refit_transport.planning.plan import TransferPlan
from refit_transport.scheduling.schedule import Schedule, Traffic
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
        return tuple(sorted({ranked.rank for side in (self.source, self.target) for ranked in side.ranks}))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank's live sides, a source, a target, both or none, each with the manifest that it published."""

    rank: int
    source: Source | None = None
    source_manifest: RankManifest | None = None
    target: Target | None = None
    target_manifest: RankManifest | None = None

    @property
    def role(self) -> RankRole:
        """What the rank is: "both" when it has two sides."""
        if self.source is not None and self.target is not None:
            return "both"
        if self.source is None and self.target is None:
            return "none"
        return "source" if self.source is not None else "target"

    def source_binding(self) -> Binding | None:
        """The source's manifest bound to its current buffers; None on a rank that is no source."""
        if self.source is None or self.source_manifest is None:
            return None
        return Binding.of(self.source_manifest, self.source.buffers())

    def target_binding(self) -> Binding | None:
        """The target's manifest bound to its current buffers; None on a rank that is no target."""
        if self.target is None or self.target_manifest is None:
            return None
        return Binding.of(self.target_manifest, self.target.buffers())

    def served_binding(self) -> Binding | None:
        """The part of the target's manifest that is served as described, bound to its memory; at any time."""
        if self.target is None or self.target_manifest is None:
            return None
        served = self.target.served()
        pieces = tuple(piece for piece in self.target_manifest.pieces if piece.buffer in served)
        return Binding.of(replace(self.target_manifest, pieces=pieces), served)

    def devices(self) -> dict[str, torch.device]:
        """The device of each buffer that a manifest's pieces point into; those that a refit makes are not there yet."""
        found: dict[str, torch.device] = {}
        for side, manifest in ((self.source, self.source_manifest), (self.target, self.target_manifest)):
            if side is not None and manifest is not None:
                used = {piece.buffer for piece in manifest.pieces}
                found |= {name: buffer.device for name, buffer in side.buffers().items() if name in used}
        return found


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a transport needs for one refit.

    payloads: of all ranks together. slot_bytes: the slot memory of each rank, of which only what is used costs memory.
    staging_bytes: extra memory of each rank at most, slots included.
    """

    payloads: int
    slot_bytes: int
    staging_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Leg:
    """One part of what a transport does: atoms, and the schedule that delivers them.

    schedule: None where a native collective moves them. delivers: "shards" when the atoms fill the targets' own pieces,
    "whole" when every target receives whole tensors, of which it takes its part.
    """

    plan: TransferPlan
    schedule: Schedule | None
    delivers: Literal["shards", "whole"]


def slot_footprint(schedules: Sequence[Schedule], sizes: SlotSizes, ranks: Iterable[int]) -> Footprint:
    """The slots that schedules which run one after the other touch at most."""
    steps: dict[int, int] = dict.fromkeys(ranks, 0)
    for schedule in schedules:
        hops, count = schedule.hops, max(1, len(schedule.payloads))
        taking_part = np.unique(np.concatenate([hops.sender, hops.receiver]) * count + np.tile(hops.payload, 2))
        found, counts = np.unique(taking_part // count, return_counts=True)
        for rank, count in zip(found.tolist(), counts.tolist(), strict=True):
            steps[rank] = max(steps[rank], count)
    used = {rank: sizes.slot_bytes * min(sizes.count, count) for rank, count in steps.items()}
    return Footprint(sum(len(schedule.payloads) for schedule in schedules), sizes.nbytes, used)


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

    def legs(self) -> Iterable[Leg]:
        """What it has planned, for explanations and verification. No element of a tensor is in two atoms."""

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """Delivers once. Collective: every rank of the job calls it, between its target's `begin` and `finish`."""
