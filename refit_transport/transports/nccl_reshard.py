"""The transport that sends each target exactly the boxes it needs, shard to shard."""

from __future__ import annotations

from collections.abc import Iterator

from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.nccl_m2n import NativeMove, require_native
from refit_transport.fabrics.program import Program, lower
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.layout.wire import digest
from refit_transport.planning.native import NativeSplit
from refit_transport.planning.plan import TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.schedule import Traffic, total_traffic
from refit_transport.scheduling.scheduler import PASSES, build_schedule
from refit_transport.transports.base import Endpoint, Footprint, Job, Leg, slot_footprint


class NcclReshard:
    """One plan and one schedule for all its tensors; programs are bound once and again only when buffers move.

    With the fabric `nccl_m2n`, tensors that a native collective can move whole have none: one refit may mix both.
    """

    def __init__(self, job: Job, tensors: tuple[str, ...]) -> None:
        settings = job.settings
        self._job = job
        is_native = settings.fabric == "nccl_m2n"
        self._split = NativeSplit.of(job.source, job.target, tensors) if is_native else NativeSplit()
        native = {tensor.name for tensor in self._split.tensors}
        self._plan = plan_transfer(job.source, job.target, tensors=[name for name in tensors if name not in native])
        self._schedule = build_schedule(
            self._plan, job.topology, bucket_bytes=settings.bucket_bytes, disabled=settings.disabled_passes
        )
        self._sizes = SlotSizes.of([self._schedule], staging_bytes=settings.staging_bytes)
        self._program: Program | None = None
        self._moves: tuple[NativeMove, ...] = ()
        self._addresses: tuple[int, ...] = ()

    def notes(self) -> dict[str, str]:
        """With the fabric `nccl_m2n`, for each tensor how it is moved, and why not otherwise."""
        native = {tensor.name: "NCCL M2N moves it whole" for tensor in self._split.tensors}
        return native | {name: f"by messages: {'; '.join(why)}" for name, why in self._split.why_not.items()}

    def digest(self) -> str:
        """See `Transport.digest`."""
        return (
            digest(self._schedule.digest(), repr(self._split.tensors))
            if self._split.tensors
            else self._schedule.digest()
        )

    def traffic(self) -> Traffic:
        """See `Transport.traffic`. Of a native collective it is what must move: each target's own shard."""
        if not self._split.tensors:
            return self._schedule.traffic()
        plan = self._native_plan()
        flat = build_schedule(plan, self._job.topology, bucket_bytes=self._job.settings.bucket_bytes, disabled=PASSES)
        return total_traffic((self._schedule.traffic(), flat.traffic()))

    def check(self) -> None:
        """See `Transport.check`."""
        self._plan.check(self._job.source, self._job.target)
        self._schedule.check(self._plan)
        self._native_plan().check(self._job.source, self._job.target)

    def footprint(self) -> Footprint:
        """See `Transport.footprint`."""
        return slot_footprint([self._schedule], self._sizes, self._job.ranks)

    def legs(self) -> Iterator[Leg]:
        """See `Transport.legs`."""
        yield Leg(self._plan, self._schedule, "shards")
        if self._split.tensors:
            yield Leg(self._native_plan(), None, "shards")

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """See `Transport.run`."""
        program = self._bound(endpoint, fabric)
        spent = Spent()
        if self._moves:
            spent.add(require_native(fabric, endpoint.rank).reshard(self._moves, deadline=deadline))
        spent.add(fabric.run(program, deadline=deadline))
        if endpoint.target is not None and endpoint.target.private_layers():
            # Its views would keep the staged weights alive, which the target gives up after each refit.
            self._program, self._moves = None, ()
        return spent

    def _native_plan(self) -> TransferPlan:
        return plan_transfer(
            self._job.source, self._job.target, tensors=[tensor.name for tensor in self._split.tensors]
        )

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
            self._moves = tuple(NativeMove.of(x, source=source, target=target) for x in self._split.tensors)
            self._addresses = addresses
        return self._program
