"""The transport that sends each target exactly the boxes it needs, shard to shard."""

from __future__ import annotations

from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Program, lower
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Traffic
from refit_transport.scheduling.scheduler import build_schedule
from refit_transport.transports.base import Endpoint, Footprint, Job, slot_footprint


class NcclReshard:
    """One plan and one schedule for all its tensors; programs are bound once and again only when buffers move."""

    def __init__(self, job: Job, tensors: tuple[str, ...]) -> None:
        settings = job.settings
        self._job = job
        self._plan = plan_transfer(job.source, job.target, tensors=tensors)
        self._schedule = build_schedule(
            self._plan, job.topology, bucket_bytes=settings.bucket_bytes, disabled=settings.disabled_passes
        )
        self._sizes = SlotSizes.of([self._schedule], staging_bytes=settings.staging_bytes)
        self._program: Program | None = None
        self._addresses: tuple[int, ...] = ()

    def digest(self) -> str:
        """See `Transport.digest`."""
        return self._schedule.digest()

    def traffic(self) -> Traffic:
        """See `Transport.traffic`."""
        return self._schedule.traffic()

    def check(self) -> None:
        """See `Transport.check`."""
        self._plan.check(self._job.source, self._job.target)
        self._schedule.check(self._plan)

    def footprint(self) -> Footprint:
        """See `Transport.footprint`."""
        return slot_footprint([self._schedule], self._sizes, self._job.ranks)

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """See `Transport.run`."""
        spent = fabric.run(self._bound(endpoint, fabric), deadline=deadline)
        if endpoint.target is not None and endpoint.target.private_layers():
            # Its views would keep the staged weights alive, which the target gives up after each refit.
            self._program = None
        return spent

    def _bound(self, endpoint: Endpoint, fabric: Fabric) -> Program:
        source, target = endpoint.source_binding(), endpoint.target_binding()
        addresses = tuple(a for binding in (source, target) if binding for a in binding.addresses())
        if self._program is None or addresses != self._addresses:
            self._program = lower(
                self._schedule,
                endpoint.rank,
                source=source,
                target=target,
                memory=fabric.memory,
                sizes=self._sizes,
            )
            self._addresses = addresses
        return self._program
