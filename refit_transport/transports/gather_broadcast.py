"""The baseline transport: whole tensors in buckets, gathered at a source rank and broadcast along chains of targets.

It needs no description of the target's layout, because the engine's own loader takes whole checkpoint tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Program, lower
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import CheckpointEntry, checkpoint_entries
from refit_transport.layout.layout import row_major_strides
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest, Piece, RankManifest, TensorSpec
from refit_transport.planning.holdings import HoldingIndex
from refit_transport.planning.plan import PlannedTensor, TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import build_broadcast
from refit_transport.scheduling.pour import aligned
from refit_transport.scheduling.schedule import Schedule, Traffic, join, total_traffic
from refit_transport.transports.base import Endpoint, Footprint, Job, slot_footprint
from refit_transport.views import torch_dtype

_STAGING = "staging"


@dataclass(frozen=True, slots=True)
class _Staged:
    """A checkpoint tensor, whole and contiguous in the staging buffer, at `offset` bytes."""

    spec: TensorSpec
    entry: CheckpointEntry
    offset: int

    @property
    def box(self) -> Box:
        return self.entry.box

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.spec.dtype]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Checkpoint tensors that travel together, their places in staging, and how they get there."""

    staged: tuple[_Staged, ...]
    staging: Manifest
    plan: TransferPlan
    schedule: Schedule

    @property
    def nbytes(self) -> int:
        return max(aligned(item.offset + item.nbytes) for item in self.staged)


class GatherBroadcast:
    """Buckets of whole checkpoint tensors, one after the other through one staging buffer per target rank.

    A bucket holds at most half of `staging_bytes` (one tensor at least); the other half is for payload slots. While a
    target loads a bucket, the next one already arrives in its slots.
    """

    def __init__(self, job: Job, tensors: tuple[str, ...]) -> None:
        self._job = job
        half = job.settings.staging_bytes // 2
        held = HoldingIndex.of(job.source, set(tensors))
        groups = _split(_wire_specs(job, set(tensors)), most_bytes=half)
        self._buckets = tuple(_bucket(job, held, staged) for staged in groups)
        self._schedule = join([bucket.schedule for bucket in self._buckets]) if self._buckets else None
        self._sizes = SlotSizes.of([self._schedule] if self._schedule else [], staging_bytes=half)
        self._staging_bytes = max((bucket.nbytes for bucket in self._buckets), default=0)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._program: Program | None = None
        self._addresses: tuple[int, ...] = ()

    def digest(self) -> str:
        """See `Transport.digest`."""
        return "" if self._schedule is None else self._schedule.digest()

    def traffic(self) -> Traffic:
        """See `Transport.traffic`."""
        return total_traffic([] if self._schedule is None else [self._schedule.traffic()])

    def check(self) -> None:
        """See `Transport.check`: every target's staging buffer receives each bucket whole."""
        for bucket in self._buckets:
            bucket.plan.check(self._job.source, bucket.staging)
            bucket.schedule.check(bucket.plan)

    def footprint(self) -> Footprint:
        """See `Transport.footprint`."""
        slots = slot_footprint([self._schedule] if self._schedule else [], self._sizes, self._job.ranks)
        targets = {ranked.rank for ranked in self._job.target.ranks}
        total = {
            rank: nbytes + (self._staging_bytes if rank in targets else 0)
            for rank, nbytes in slots.staging_bytes.items()
        }
        return Footprint(slots.payloads, slots.slot_bytes, total)

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """See `Transport.run`."""
        if self._schedule is None:
            return Spent()
        source = endpoint.source_binding()
        addresses = source.addresses() if source else ()
        if self._program is None or addresses != self._addresses:
            self._program = self._lower(self._schedule, endpoint, source, fabric)
            self._addresses = addresses
        return fabric.run(self._program, deadline=deadline)

    def _lower(self, schedule: Schedule, endpoint: Endpoint, source: Binding | None, fabric: Fabric) -> Program:
        """Binds the program to the staging buffer; a target's last payload of each bucket is followed by loading it."""
        bound = partial(
            lower, schedule, endpoint.rank, memory=fabric.memory, sizes=self._sizes, source=source, receive="slots"
        )
        if endpoint.target is None:
            return bound(target=None)
        self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=fabric.memory.own.device)
        specs = tuple({item.spec.name: item.spec for bucket in self._buckets for item in bucket.staged}.values())
        pieces = tuple(_piece(item) for bucket in self._buckets for item in bucket.staged)
        staging = RankManifest(endpoint.rank, "target", specs, pieces)
        program = bound(target=Binding.of(staging, {_STAGING: self._staging}))
        steps = list(program.steps)
        payloads = [step.payload for step in steps]
        ends = np.cumsum([len(bucket.schedule.payloads) for bucket in self._buckets]).tolist()
        for bucket, end in zip(self._buckets, ends, strict=True):
            last = bisect_left(payloads, end) - 1
            steps[last] = replace(steps[last], then=partial(endpoint.target.load, _Loaded(bucket, self._staging)))
        return replace(program, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A bucket's tensors as the loader takes them, by checkpoint name; can be gone through again at each refit."""

    bucket: _Bucket
    buffer: torch.Tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.bucket.staged:
            flat = self.buffer[item.offset : item.offset + item.nbytes].view(torch_dtype(item.spec.dtype))
            yield item.entry.name, flat.view(item.entry.shape)


def broadcast_traffic(job: Job, tensors: Sequence[str]) -> Traffic:
    """What gathering and broadcasting these tensors moves, found without cutting it into buckets and payloads."""
    specs = _wire_specs(job, set(tensors))
    staged = tuple(_Staged(spec, CheckpointEntry(spec.name, spec.name, spec.box), 0) for spec in specs)
    whole = replace(job, settings=replace(job.settings, bucket_bytes=1 << 62))
    return _bucket(whole, HoldingIndex.of(job.source, set(tensors)), staged).schedule.traffic()


def _wire_specs(job: Job, names: set[str]) -> Iterator[TensorSpec]:
    """The chosen tensors with the dtype that travels."""
    dtypes = {spec.name: spec.dtype for spec in job.target.tensors}
    for spec in job.source.tensors:
        if spec.name in names and 0 not in spec.shape:
            planned = PlannedTensor(spec.name, spec.shape, spec.dtype, dtypes.get(spec.name, spec.dtype))
            yield TensorSpec(spec.name, spec.shape, planned.wire_dtype)


def _split(specs: Iterator[TensorSpec], *, most_bytes: int) -> Iterator[tuple[_Staged, ...]]:
    """Consecutive checkpoint tensors in groups of at most `most_bytes`, one tensor at least."""
    group: list[_Staged] = []
    for spec in specs:
        for entry in checkpoint_entries(spec):
            item = _Staged(spec, entry, _end(group))
            if group and item.offset + item.nbytes > most_bytes:
                yield tuple(group)
                group, item = [], _Staged(spec, entry, 0)
            group.append(item)
    if group:
        yield tuple(group)


def _end(group: Sequence[_Staged]) -> int:
    return aligned(group[-1].offset + group[-1].nbytes) if group else 0


def _bucket(job: Job, held: HoldingIndex, staged: tuple[_Staged, ...]) -> _Bucket:
    specs = tuple({item.spec.name: item.spec for item in staged}.values())
    pieces = tuple(_piece(item) for item in staged)
    staged_there = RankManifest(0, "target", specs, pieces)
    staging = Manifest.of(staged_there.replica(ranked.rank) for ranked in job.target.ranks)
    plan = plan_transfer(job.source, staging, held=held)
    settings = job.settings
    schedule = build_broadcast(plan, job.topology, chains=settings.chains, bucket_bytes=settings.bucket_bytes)
    return _Bucket(staged, staging, plan, schedule)


def _piece(item: _Staged) -> Piece:
    offset = item.offset // DTYPE_BYTES[item.spec.dtype]
    return Piece(item.spec.name, item.box, _STAGING, offset, row_major_strides(item.box.shape))
