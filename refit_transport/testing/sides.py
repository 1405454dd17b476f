"""A source and a target over plain tensors in this process, for tests of everything between the two adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from refit_transport.checksum import Derived
from refit_transport.errors import LayoutError
from refit_transport.fabrics.binding import Binding
from refit_transport.layout.manifest import Opaque, RankManifest, TensorSpec


class HeldSource:
    """A source whose manifest and buffers are given."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def manifest(self, rank: int) -> RankManifest:
        """The given manifest; `rank` must be its own."""
        if rank != self._binding.manifest.rank:
            raise LayoutError("", rank, f"rank {self._binding.manifest.rank}", str(rank))
        return self._binding.manifest

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The given buffers."""
        return self._binding.buffers


class HeldTarget:
    """A target whose manifest and buffers are given; `load` copies whole tensors into every piece of theirs.

    `loaded` lists the checkpoint names that came whole, `calls` the lifecycle calls in order.
    """

    def __init__(self, binding: Binding, *, opaque: Mapping[str, str] | None = None) -> None:
        self._binding = binding
        self._opaque = dict(opaque or {})
        self.loaded: list[str] = []
        self.calls: list[str] = []

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:  # noqa: ARG002
        """The given manifest, without pieces of the opaque tensors."""
        self.calls.append("manifest")
        held = self._binding.manifest
        pieces = tuple(piece for piece in held.pieces if piece.tensor not in self._opaque)
        opaque = tuple(Opaque(tensor, reason) for tensor, reason in self._opaque.items())
        return RankManifest(rank, "target", held.tensors, pieces, opaque)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The given buffers."""
        return self._binding.buffers

    def private_layers(self) -> Mapping[str, str]:
        """None."""
        return {}

    def begin(self) -> None:
        """Recorded."""
        self.calls.append("begin")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies each checkpoint tensor's part of every piece."""
        for name, tensor in weights:
            self.loaded.append(name)
            self._binding.take(name, tensor)

    def finish(self) -> None:
        """Recorded."""
        self.calls.append("finish")

    def served(self) -> Mapping[str, torch.Tensor]:
        """All buffers."""
        return self.buffers()

    def derived(self) -> Iterator[Derived]:
        """None."""
        return iter(())
