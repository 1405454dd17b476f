"""Checksums of logical boxes on both sides of a refit, compared without gathering anything."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch

from refit_transport.errors import AgreementError, VerificationError
from refit_transport.fabrics.program import Binding
from refit_transport.layout.manifest import Manifest
from refit_transport.planning.plan import TransferPlan
from refit_transport.planning.planner import plan_transfer
from refit_transport.views import torch_dtype

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
        rank, sums = binding.manifest.rank, {}
        for atom in atoms:
            holder, piece = next(iter(self._plan.holders.of(atom)))
            if holder == rank:
                sums[str(atom)] = self._checksum(binding, atom, piece)
        return sums

    def compare_replicas(self, binding: Binding, atoms: Iterable[int], sums: Mapping[str, int]) -> None:
        """Compares the boxes that this source rank holds beside another with what their first holder has.

        Raises:
            AgreementError: they differ, so what the targets got depends on who sent it; names the box and both ranks.
        """
        rank = binding.manifest.rank
        for atom in atoms:
            (first, _), *others = self._plan.holders.of(atom)
            for holder, piece in others:
                if holder != rank or (found := self._checksum(binding, atom, piece)) == sums[str(atom)]:
                    continue
                what = f"tensor {self._plan.tensors[self._plan.tensor[atom]].name}, box {self._plan.box(atom)}"
                raise AgreementError(what, ((f"checksum {sums[str(atom)]:08x}", (first,)), (f"{found:08x}", (rank,))))

    def compare(self, binding: Binding, atoms: Iterable[int], sums: Mapping[str, int], version: int) -> int:
        """Compares this target rank's boxes with the sources' checksums; returns how many.

        Raises:
            VerificationError: the first box that differs.
        """
        rank, count = binding.manifest.rank, 0
        for atom in atoms:
            for wanter, piece in self._plan.wanters.of(atom):
                if wanter != rank:
                    continue
                count += 1
                if self._checksum(binding, atom, piece) != sums[str(atom)]:
                    holder = next(iter(self._plan.holders.of(atom)))[0]
                    name = self._plan.tensors[self._plan.tensor[atom]].name
                    raise VerificationError(name, str(self._plan.box(atom)), holder, rank, version)
        return count

    def _checksum(self, binding: Binding, atom: int, piece: int) -> int:
        box = self._plan.box(atom)
        dtype = torch_dtype(self._plan.tensors[self._plan.tensor[atom]].wire_dtype)
        view = binding.box_view(piece, box).to(device="cpu", dtype=dtype).contiguous()
        return zlib.crc32(view.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer it is
