"""The whole plan of a session's refits, from a job: routes, a transport for each, and what they will move."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from refit_transport.layout.manifest import DTYPE_BYTES
from refit_transport.layout.wire import digest
from refit_transport.planning.plan import PlannedTensor
from refit_transport.planning.planner import check_sides_agree, plan_transfer
from refit_transport.planning.routing import route_tensors, skipped_tensors
from refit_transport.report import PlanSummary
from refit_transport.scheduling.schedule import Traffic
from refit_transport.staging import staged_bytes
from refit_transport.transports.base import Footprint, Job, Transport
from refit_transport.transports.gather_broadcast import broadcast_traffic
from refit_transport.transports.nccl_reshard import NcclReshard
from refit_transport.transports.registry import load, resolve
from refit_transport.verification import Verifier


class RefitPlan:
    """What is decided before the first byte moves: routes, transports, summary. Pure; equal on every rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        settings = job.settings
        check_sides_agree(job.source, job.target)
        self.routes = route_tensors(
            job.target, transport=settings.transport, coverage=settings.coverage, rules=settings.routes
        )
        groups: dict[str, list[str]] = {}
        for route in self.routes:
            groups.setdefault(route.transport, []).append(route.tensor)
        self.transports: dict[str, Transport] = {
            name: load(resolve(name))(job, tuple(tensors)) for name, tensors in sorted(groups.items())
        }
        reshards = (transport for transport in self.transports.values() if isinstance(transport, NcclReshard))
        notes = {tensor: note for transport in reshards for tensor, note in transport.notes().items()}
        self.routes = tuple(
            replace(route, reason=f"{route.reason}; {notes[route.tensor]}") if route.tensor in notes else route
            for route in self.routes
        )

    def digest(self) -> str:
        """Of routes, schedules and settings."""
        parts = (repr(self.routes), repr(self.job.settings), repr(self.job.topology))
        return digest(*parts, *(transport.digest() for transport in self.transports.values()))

    @cached_property
    def footprints(self) -> dict[str, Footprint]:
        """What each transport needs."""
        return {name: transport.footprint() for name, transport in self.transports.items()}

    @property
    def slot_bytes(self) -> int:
        """The slot memory that every rank's fabric must have: transports run one after the other."""
        return max((footprint.slot_bytes for footprint in self.footprints.values()), default=0)

    def extra_bytes(self, rank: int) -> int:
        """What a refit takes on a rank besides its weights at most: slots, staging, and what a staged commit keeps."""
        extra = sum(footprint.staging_bytes.get(rank, 0) for footprint in self.footprints.values())
        if self.job.settings.commit == "in_place":
            return extra
        sizes = {spec.name: math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in self.job.source.tensors}
        for ranked in self.job.target.ranks:
            if ranked.rank == rank:
                whole = sum(sizes[opaque.tensor] for opaque in ranked.opaque)
                extra += staged_bytes(ranked) + whole
        return extra

    @cached_property
    def old_way(self) -> Traffic:
        """What gathering and broadcasting every tensor would move."""
        return broadcast_traffic(self.job, [route.tensor for route in self.routes])

    @cached_property
    def tensor_bytes(self) -> dict[str, int]:
        """The bytes of each tensor that some target needs, in the dtype that the wire carries."""
        held = {spec.name: spec for spec in self.job.source.tensors}
        wanted = {spec.name: spec for spec in self.job.target.tensors}
        return {
            name: math.prod(spec.shape) * PlannedTensor(name, spec.shape, held[name].dtype, spec.dtype).wire_bytes
            for name, spec in ((route.tensor, wanted[route.tensor]) for route in self.routes)
        }

    def summary(self) -> PlanSummary:
        """The planned bytes beside those of `old_way`."""
        names = {route.tensor for route in self.routes}
        skipped = skipped_tensors((spec.name for spec in self.job.source.tensors), names)
        traffic = {name: transport.traffic() for name, transport in self.transports.items()}
        return PlanSummary.of(traffic, self.old_way, self.routes, self.tensor_bytes, skipped)

    @cached_property
    def verifier(self) -> Verifier:
        """Over all tensors that the targets describe, whatever their transport.

        What goes shard to shard is compared in the boxes that travel. What arrives whole is cut anew, by both sides.
        """
        whole = {o.tensor: f"the target takes it whole: {o.reason}" for r in self.job.target.ranks for o in r.opaque}
        legs = [leg for transport in self.transports.values() for leg in transport.legs() if leg.delivers == "shards"]
        travelling = {tensor.name for leg in legs for tensor in leg.plan.tensors}
        rest = [r.tensor for r in self.routes if r.tensor not in travelling and r.tensor not in whole]
        plans = [leg.plan for leg in legs] + [plan_transfer(self.job.source, self.job.target, tensors=rest)]
        return Verifier(plans, whole)
