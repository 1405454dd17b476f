"""A target that receives beside its weights: what is served stays whole until everything has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from refit_transport.errors import VerificationError
from refit_transport.fabrics.binding import Binding
from refit_transport.layout.canonical import canonical_name
from refit_transport.layout.manifest import RankManifest, TensorSpec
from refit_transport.targets.base import Target
from refit_transport.views import make_buffers

if TYPE_CHECKING:
    from refit_transport.checksum import Derived


class StagedTarget:
    """Wraps a target: refits write into memory of its own, and `apply` has the target take it over.

    The memory is one copy of this rank's own weights, kept for the next refit, and until the target has taken them over
    the whole tensors that nothing but its own loader understands.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._manifest: RankManifest | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._whole: list[tuple[str, torch.Tensor]] = []
        self._opaque: frozenset[str] = frozenset()

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:
        """See `targets.base.Target`."""
        self._manifest = self._target.manifest(rank, tensors)
        device = next((buffer.device for buffer in self._target.buffers().values()), torch.device("cpu"))
        self._held = make_buffers(self._manifest, device=device)
        self._opaque = frozenset(opaque.tensor for opaque in self._manifest.opaque)
        return self._manifest

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The memory beside: flat, so that a piece's offset and strides mean in it what they mean in the target."""
        return self._held

    def private_layers(self) -> Mapping[str, str]:
        """See `targets.base.Target`."""
        return self._target.private_layers()

    def begin(self) -> None:
        """Opens a refit; the target doesn't notice."""
        self._whole = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes this rank's part of each tensor; what can't be described as parts is kept whole for the loader."""
        held, _ = self._bindings()
        for name, whole in weights:
            if canonical_name(name).tensor in self._opaque:
                self._whole.append((name, whole.detach().clone()))
            else:
                held.take(name, whole)

    def finish(self) -> None:
        """All has arrived; the target doesn't notice."""

    def apply(self) -> None:
        """Has the target take over what has arrived. It isn't to be used meanwhile, nor when this raises."""
        self._target.begin()
        held, live = self._bindings()
        for index in range(len(held.manifest.pieces)):
            live.view(index).copy_(held.view(index))
        self._target.load(self._whole)
        self._target.finish()
        self._whole = []

    def check(self, version: int) -> None:
        """Proves that the target serves what had arrived, where it serves it as it arrives.

        Raises:
            VerificationError: naming the first tensor and box that differ.
        """
        served = self._target.served()
        held, live = self._bindings(served)
        for index, piece in enumerate(held.manifest.pieces):
            if piece.buffer in served and not _same_bytes(held.view(index), live.view(index)):
                rank = held.manifest.rank
                raise VerificationError(piece.tensor, str(piece.box), -1, rank, version)

    def served(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`."""
        return self._target.served()

    def derived(self) -> Iterator[Derived]:
        """See `targets.base.Target`."""
        return self._target.derived()

    def _bindings(self, live: Mapping[str, torch.Tensor] | None = None) -> tuple[Binding, Binding]:
        assert self._manifest is not None
        buffers = self._target.buffers() if live is None else live
        return Binding.of(self._manifest, self._held), Binding.of(self._manifest, buffers)


def staged_bytes(manifest: RankManifest) -> int:
    """The memory beside its weights that a rank's staged refits take, in bytes; without tensors that arrive whole."""
    return sum(buffer.nbytes for buffer in make_buffers(manifest, device="meta").values())


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit; NaN is equal to itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
