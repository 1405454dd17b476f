"""The schedule of a gather and a pipelined chain broadcast: what a refit without resharding does, done well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from refit_transport.layout.box import Box
from refit_transport.layout.layout import row_major_strides
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest, Piece, RankManifest, TensorSpec
from refit_transport.planning.overlap import boxes_to_array
from refit_transport.planning.plan import Parcels, TransferPlan, slabs
from refit_transport.planning.planner import PieceIndex, plan_transfer
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import Draft, Leg, aligned, assemble
from refit_transport.scheduling.topology import Topology

STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Staged:
    """A box of a logical tensor, whole and contiguous in a staging buffer, at `offset` bytes."""

    tensor: TensorSpec
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPE_BYTES[self.tensor.dtype]


def stage(boxes: Sequence[tuple[TensorSpec, Box]]) -> tuple[Staged, ...]:
    """Lays boxes out one after the other in a staging buffer, each aligned to 16 bytes."""
    staged, end = [], 0
    for tensor, box in boxes:
        staged.append(Staged(tensor, box, end))
        end = aligned(end + staged[-1].nbytes)
    return tuple(staged)


def staged_bytes(staged: Sequence[Staged]) -> int:
    """The size of the staging buffer that holds them."""
    return max((aligned(item.offset + item.nbytes) for item in staged), default=0)


def build_chain(
    source: Manifest,
    staged: Sequence[Staged],
    *,
    root: int,
    chain: Sequence[int],
    topology: Topology,
    chunk_bytes: int,
    held: PieceIndex | None = None,
) -> tuple[Schedule, Manifest]:
    """Gathers the boxes at source rank `root` and passes them from rank to rank along `chain`, chunk after chunk.

    Returns the schedule and the manifest of the staging buffers that it fills (those of `root` and of every rank of
    `chain`); pieces are slabs of at most `chunk_bytes` in the buffer named "staging", whose elements are of the box's
    dtype, so offsets count from a view of that dtype. `held` are the source's pieces by tensor, where the caller has
    them.

    Raises:
        PlanError: no source rank holds some part of a box.
    """
    slabs = tuple(piece for item in staged for piece in _slabs(item, chunk_bytes))
    specs = tuple({item.tensor.name: item.tensor for item in staged}.values())
    staging = Manifest.of(RankManifest(rank, "target", specs, slabs) for rank in (root, *chain))
    plan = plan_transfer(source, Manifest.of([staging.ranks[_index(staging, root)]]), held=held)
    nbytes = [*plan.nbytes().tolist(), *(_slab_bytes(slab, specs) for slab in slabs)]
    legs = _gather(plan, root)
    drafts = _pass_on(legs, nbytes[len(plan) :], first_parcel=len(plan), ranks=(root, *chain), chunk_bytes=chunk_bytes)
    return assemble(_with_slabs(plan, slabs), nbytes, legs, drafts, topology), staging


def _index(manifest: Manifest, rank: int) -> int:
    return [ranked.rank for ranked in manifest.ranks].index(rank)


def _slab_bytes(slab: Piece, specs: Sequence[TensorSpec]) -> int:
    return slab.box.numel * DTYPE_BYTES[next(spec.dtype for spec in specs if spec.name == slab.tensor)]


def _slabs(item: Staged, chunk_bytes: int) -> list[Piece]:
    """Cuts a staged box into pieces of at most `chunk_bytes` (one element at least) of the staging buffer."""
    width, dims = DTYPE_BYTES[item.tensor.dtype], len(item.box.spans)
    strides = row_major_strides(item.box.shape)
    pieces = []
    for part in slabs(boxes_to_array((item.box,), dims), max(1, chunk_bytes // width))[:, :dims].tolist():
        box = Box.of(*map(tuple, part))
        inside = sum((p - q) * step for p, q, step in zip(box.offset, item.box.offset, strides, strict=True))
        pieces.append(Piece(item.tensor.name, box, STAGING, item.offset // width + inside, strides))
    return pieces


def _gather(plan: TransferPlan, root: int) -> list[Leg]:
    """A leg per atom from a holder (the root itself where it is one) to the root."""
    legs: list[Leg] = []
    for atom in range(len(plan)):
        holders = list(plan.holders.of(atom))
        holder = next((pair for pair in holders if pair[0] == root), holders[0])
        legs.extend(Leg(atom, *holder, *want) for want in plan.wanters.of(atom))
    return legs


def _pass_on(
    legs: list[Leg],
    slab_bytes: Sequence[int],
    *,
    first_parcel: int,
    ranks: Sequence[int],
    chunk_bytes: int,
) -> list[Draft]:
    """Appends the chain's legs and groups all by chunk: a gather message per sender, then a message per hop."""
    drafts: list[Draft] = []
    into: dict[int, list[int]] = defaultdict(list)
    for index, leg in enumerate(legs):
        into[leg.receiver_piece].append(index)
    for number, chunk in enumerate(_chunks(slab_bytes, chunk_bytes)):
        senders: dict[int, list[int]] = defaultdict(list)
        for slab in chunk:
            for index in into[slab]:
                senders[legs[index].sender].append(index)
        parents = []
        for sender in sorted(senders):
            parents.append(len(drafts))
            drafts.append(Draft(tuple(senders[sender]), (number, 0, sender)))
        for hop, (here, there) in enumerate(pairwise(ranks), start=1):
            members = tuple(range(len(legs), len(legs) + len(chunk)))
            legs += [Leg(first_parcel + slab, here, slab, there, slab, relayed=True) for slab in chunk]
            drafts.append(Draft(members, (number, hop, here), tuple(parents)))
            parents = [len(drafts) - 1]
    return drafts


def _chunks(slab_bytes: Sequence[int], chunk_bytes: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    filled = 0
    for slab, nbytes in enumerate(slab_bytes):
        if not chunks or filled + nbytes > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(slab)
        filled += nbytes
    return chunks


def _with_slabs(plan: TransferPlan, slabs: Sequence[Piece]) -> Parcels:
    index = {tensor.name: number for number, tensor in enumerate(plan.tensors)}
    dims = plan.lo.shape[1]
    lo = [(*slab.box.offset, *(0,) * (dims - len(slab.box.spans))) for slab in slabs]
    hi = [(*(s.stop for s in slab.box.spans), *(1,) * (dims - len(slab.box.spans))) for slab in slabs]
    return Parcels(
        plan.tensors,
        np.concatenate((plan.tensor, np.array([index[slab.tensor] for slab in slabs], dtype=np.int64))),
        np.concatenate((plan.lo, np.array(lo, dtype=np.int64).reshape(-1, dims))),
        np.concatenate((plan.hi, np.array(hi, dtype=np.int64).reshape(-1, dims))),
    )
