"""Checksums of logical boxes on both sides of a refit, compared without gathering anything."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch

from refit_transport.errors import AgreementError, VerificationError
from refit_transport.fabrics.binding import Binding, Part
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest
from refit_transport.planning.plan import TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.views import box_view, torch_dtype

_SAMPLED_SHARE = 16


class Verifier:
    """Compares boxes of the transfer plan: CRC-32 of their bytes in wire dtype, in row-major order.

    The first holder of each box computes the source's checksum; its other holders and every target rank compute their
    own from the memory that their manifests describe.
    """

    def __init__(self, source: Manifest, target: Manifest, tensors: Iterable[str]) -> None:
        self._plan: TransferPlan = plan_transfer(source, target, tensors=tensors)

    def atoms(self, refit: int, *, share: str) -> list[int]:
        """The boxes to compare at the refit of this number: all, or for "sample" every 16th, others each time."""
        step = 1 if share == "full" else min(_SAMPLED_SHARE, max(1, len(self._plan)))
        return list(range(refit % step, len(self._plan), step))

    def source_checksums(self, binding: Binding, atoms: Iterable[int]) -> dict[str, int]:
        """Checksums of the boxes of which this source rank is the first holder; keys are JSON-able."""
        rank = binding.manifest.rank
        mine = (atom for atom in atoms if self._first_holder(atom) == rank)
        return {str(atom): self._checksum(binding.cover(*self._box(atom)), atom) for atom in mine}

    def compare_replicas(self, binding: Binding, atoms: Iterable[int], sums: Mapping[str, int]) -> None:
        """Compares the boxes that this source rank holds beside another with what their first holder has.

        Raises:
            AgreementError: they differ, so what the targets got depends on who sent it; names the box and both ranks.
        """
        rank = binding.manifest.rank
        for atom in atoms:
            first, *others = self._plan.rank_sets[self._plan.holders[atom]]
            if rank not in others:
                continue
            name, box = self._box(atom)
            found = self._checksum(binding.cover(name, box), atom)
            if found != sums[str(atom)]:
                values = ((f"checksum {sums[str(atom)]:08x}", (first,)), (f"{found:08x}", (rank,)))
                raise AgreementError(f"tensor {name}, box {box}", values)

    def compare(self, binding: Binding, atoms: Iterable[int], sums: Mapping[str, int], version: int) -> int:
        """Compares this target rank's boxes with the sources' checksums; returns how many.

        Raises:
            VerificationError: the first box that differs.
        """
        rank, count = binding.manifest.rank, 0
        for atom in atoms:
            if rank not in self._plan.rank_sets[self._plan.wanters[atom]]:
                continue
            count += 1
            name, box = self._box(atom)
            if any(self._checksum(parts, atom) != sums[str(atom)] for parts in _copies(binding.parts(name, box), box)):
                raise VerificationError(name, str(box), self._first_holder(atom), rank, version)
        return count

    def _first_holder(self, atom: int) -> int:
        first: int = self._plan.rank_sets[self._plan.holders[atom]][0]
        return first

    def _box(self, atom: int) -> tuple[str, Box]:
        return self._plan.name(atom), self._plan.box(atom)

    def _checksum(self, parts: Iterable[Part], atom: int) -> int:
        box, dtype = self._plan.box(atom), torch_dtype(self._plan.tensors[self._plan.tensor[atom]].wire_dtype)
        whole = torch.empty(box.shape, dtype=dtype)
        for part in parts:
            box_view(whole, box, part.box).copy_(part.view)
        return zlib.crc32(whole.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer it is


def _copies(parts: list[Part], box: Box) -> list[list[Part]]:
    """A target may keep a box twice (tied weights): each whole copy, and what is left if it makes up another."""
    whole = [part for part in parts if part.box == box]
    rest = [part for part in parts if part.box != box]
    complete = sum(part.box.numel for part in rest) >= box.numel
    return [[part] for part in whole] + ([rest] if complete else [])
