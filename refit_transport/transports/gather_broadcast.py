"""The baseline transport: whole tensors, gathered in buckets at a source rank and passed along a chain of all targets.

It needs no description of the target's layout, because the engine's own loader takes whole checkpoint tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Binding, Program, SlotPool, lower
from refit_transport.layout.canonical import CheckpointEntry, checkpoint_entries
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest, TensorSpec
from refit_transport.layout.wire import digest
from refit_transport.planning.plan import PlannedTensor
from refit_transport.planning.planner import PieceIndex
from refit_transport.scheduling.chain import STAGING, Staged, build_chain, stage, staged_bytes
from refit_transport.scheduling.schedule import Schedule, Traffic, total_traffic
from refit_transport.scheduling.topology import Topology
from refit_transport.transports.base import Endpoint, Footprint, Job
from refit_transport.views import torch_dtype


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Checkpoint tensors that travel together, their places in staging, and the messages that fill it."""

    entries: tuple[CheckpointEntry, ...]
    staged: tuple[Staged, ...]
    schedule: Schedule
    staging: Manifest


class GatherBroadcast:
    """Buckets of whole checkpoint tensors, one after the other through one staging buffer per rank.

    A bucket holds at most half of `staging_bytes` (one tensor at least); the other half is for message slots.
    """

    def __init__(self, job: Job, tensors: tuple[str, ...]) -> None:
        self._job = job
        half = job.settings.staging_bytes // 2
        chain = _chain(job.target, job.topology)
        groups = _split(_wire_specs(job, set(tensors)), most_bytes=half)
        held = PieceIndex.of(job.source, set(tensors))
        self._buckets = tuple(_bucket(job, held, entries, chain) for entries in groups)
        self._pool = SlotPool([bucket.schedule for bucket in self._buckets], staging_bytes=half)
        self._staging_bytes = max((staged_bytes(bucket.staged) for bucket in self._buckets), default=0)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._programs: tuple[Program, ...] = ()
        self._addresses: tuple[int, ...] = ()

    def digest(self) -> str:
        """See `Transport.digest`."""
        return digest(*(bucket.schedule.digest() for bucket in self._buckets))

    def traffic(self) -> Traffic:
        """See `Transport.traffic`."""
        return total_traffic(bucket.schedule.traffic() for bucket in self._buckets)

    def check(self) -> None:
        """See `Transport.check`: every chain rank's staging buffer receives each bucket whole."""
        for bucket in self._buckets:
            bucket.schedule.check(self._job.source, bucket.staging)

    def footprint(self) -> Footprint:
        """See `Transport.footprint`. Slots serve one bucket after the other."""
        schedules = [bucket.schedule for bucket in self._buckets]
        slots = {
            rank: max((self._pool.most_bytes(schedule, rank) for schedule in schedules), default=0)
            for rank in self._job.ranks
        }
        total = {rank: self._staging_bytes + slot_bytes for rank, slot_bytes in slots.items()}
        return Footprint(sum(len(schedule.messages) for schedule in schedules), total)

    def run(self, endpoint: Endpoint, fabric: Fabric, *, deadline: Deadline) -> Spent:
        """See `Transport.run`. Targets load each bucket before they take the next."""
        spent = Spent()
        self._bind(endpoint)
        for bucket, program in zip(self._buckets, self._programs, strict=True):
            spent.add(fabric.run(program, deadline=deadline))
            if endpoint.target is not None:
                with spent.timing("load"):
                    endpoint.target.load(_tensors(bucket, self._staging))
        return spent

    def _bind(self, endpoint: Endpoint) -> None:
        """Binds the programs to the staging buffer, and again when the source's buffers have moved."""
        source = endpoint.source_binding()
        addresses = source.addresses() if source else ()
        if self._programs and addresses == self._addresses:
            return
        self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8)
        self._addresses = addresses
        self._programs = tuple(self._lower(bucket, endpoint.rank, source) for bucket in self._buckets)

    def _lower(self, bucket: _Bucket, rank: int, source: Binding | None) -> Program:
        here = next((ranked for ranked in bucket.staging.ranks if ranked.rank == rank), None)
        target = None if here is None else Binding.of(here, {STAGING: self._staging})
        return lower(bucket.schedule, rank, source=source, target=target, pool=self._pool)


def _chain(target: Manifest, topology: Topology) -> tuple[int, ...]:
    """All target ranks, domain by domain, so that the chain enters each domain once."""
    return tuple(sorted((ranked.rank for ranked in target.ranks), key=lambda rank: (topology.domain(rank), rank)))


def _wire_specs(job: Job, names: set[str]) -> Iterator[TensorSpec]:
    """The chosen tensors with the dtype that travels."""
    dtypes = {spec.name: spec.dtype for spec in job.target.tensors}
    for spec in job.source.tensors:
        if spec.name in names and spec.box.numel:
            planned = PlannedTensor(spec.name, spec.shape, spec.dtype, dtypes.get(spec.name, spec.dtype))
            yield TensorSpec(spec.name, spec.shape, planned.wire_dtype)


def _split(specs: Iterator[TensorSpec], *, most_bytes: int) -> Iterator[tuple[tuple[TensorSpec, CheckpointEntry], ...]]:
    """Consecutive checkpoint tensors in groups of at most `most_bytes`, one tensor at least."""
    group: list[tuple[TensorSpec, CheckpointEntry]] = []
    filled = 0
    for spec in specs:
        for entry in checkpoint_entries(spec):
            nbytes = entry.box.numel * DTYPE_BYTES[spec.dtype]
            if group and filled + nbytes > most_bytes:
                yield tuple(group)
                group, filled = [], 0
            group.append((spec, entry))
            filled += nbytes
    if group:
        yield tuple(group)


def _bucket(
    job: Job, held: PieceIndex, entries: Sequence[tuple[TensorSpec, CheckpointEntry]], chain: tuple[int, ...]
) -> _Bucket:
    staged = stage([(spec, entry.box) for spec, entry in entries])
    schedule, staging = build_chain(
        job.source,
        staged,
        root=_root(held, staged),
        chain=chain,
        topology=job.topology,
        chunk_bytes=job.settings.bucket_bytes,
        held=held,
    )
    return _Bucket(tuple(entry for _, entry in entries), staged, schedule, staging)


def _root(held: PieceIndex, staged: Sequence[Staged]) -> int:
    """The source rank that already holds most of the bucket; the lowest of equals."""
    elements: dict[int, int] = defaultdict(int)
    for item in staged:
        found = held.of_tensor(item.tensor.name)
        for box, owners in zip(found.boxes, found.owners, strict=True):
            common = box.intersect(item.box)
            if common is not None:
                for rank, _ in owners:
                    elements[rank] += common.numel
    return max(elements, key=lambda rank: (elements[rank], -rank))


def _tensors(bucket: _Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, item in zip(bucket.entries, bucket.staged, strict=True):
        flat = buffer[item.offset : item.offset + item.nbytes].view(torch_dtype(item.tensor.dtype))
        yield entry.name, flat.view(entry.shape)
