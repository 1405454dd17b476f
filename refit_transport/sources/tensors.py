"""Tensors by name as the two sides of a refit, without an engine: DTensors, and local tensors with a layout.

Unlike in state dicts of models, a name here is nothing but a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from refit_transport.checksum import Derived
from refit_transport.errors import LayoutError, TransferError
from refit_transport.layout.layout import Layout
from refit_transport.layout.manifest import Piece, RankManifest, Role, TensorSpec
from refit_transport.memory import overlaps_itself
from refit_transport.sources.dtensor import local_part, pieces_of_local


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """This process's part of a tensor in `layout`, whose mesh has global ranks; of any strides."""

    tensor: torch.Tensor
    layout: Layout


# A tensor that is no DTensor is whole on the rank that gives it.
Holding = torch.Tensor | Local


@dataclass(frozen=True, slots=True)
class _Held:
    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    pieces: tuple[Piece, ...]


class TensorSource:
    """Implements `sources.base.Source`: sends these tensors as they are at each refit.

    `global_rank` is this process's number in the meshes of `Local`s.
    """

    def __init__(self, tensors: Mapping[str, Holding], *, global_rank: int) -> None:
        self._tensors, self._rank = dict(tensors), global_rank

    def manifest(self, rank: int) -> RankManifest:
        """Describes this process's local tensors as refit rank `rank`.

        Raises:
            LayoutError: a partial tensor, or a local tensor whose shape contradicts its layout.
        """
        return _manifest(rank, "source", _held(self._tensors, self._rank))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The local tensors as they are now, without autograd."""
        return {held.name: held.local for held in _held(self._tensors, self._rank)}


class TensorTarget:
    """Implements `targets.base.Target`: refits write into these tensors in place."""

    def __init__(self, tensors: Mapping[str, Holding], *, global_rank: int) -> None:
        self._tensors, self._rank = dict(tensors), global_rank

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:  # noqa: ARG002
        """Describes this process's local tensors; that the source has them all is the plan's to prove.

        Raises:
            LayoutError: as a source's, or a local tensor two of whose elements share memory.
        """
        entries = list(_held(self._tensors, self._rank))
        for held in entries:
            if overlaps_itself(held.local):
                shape, strides = list(held.local.shape), list(held.local.stride())
                raise LayoutError(held.name, rank, "memory of its own for each element", f"{shape} strided {strides}")
        return _manifest(rank, "target", entries)

    def meshes(self) -> dict[tuple[int, ...], frozenset[str]]:
        """The names of the tensors whose layouts have these global ranks; whole tensors are in none."""
        found: dict[tuple[int, ...], set[str]] = {}
        for name, holding in self._tensors.items():
            if isinstance(holding, Local):
                found.setdefault(holding.layout.mesh.ranks, set()).add(name)
            elif isinstance(holding, DTensor):
                found.setdefault(tuple(holding.device_mesh.mesh.flatten().tolist()), set()).add(name)
        return {ranks: frozenset(names) for ranks, names in found.items()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The local tensors as they are now, without autograd."""
        return {held.name: held.local for held in _held(self._tensors, self._rank)}

    def private_layers(self) -> Mapping[str, str]:
        """None: the tensors are what is used."""
        return {}

    def begin(self) -> None:
        """Nothing to open."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # noqa: ARG002
        """Never called, since nothing here must arrive whole."""
        raise TransferError(self._rank, -1, "load", "", "plain tensors are only sent shard to shard")

    def finish(self) -> None:
        """Nothing to close."""

    def served(self) -> Mapping[str, torch.Tensor]:
        """All buffers."""
        return self.buffers()

    def derived(self) -> Iterator[Derived]:
        """None."""
        return iter(())


def _manifest(rank: int, role: Role, entries: Iterable[_Held]) -> RankManifest:
    entries = list(entries)
    specs = (TensorSpec(e.name, e.shape, str(e.local.dtype).removeprefix("torch.")) for e in entries)
    return RankManifest(rank, role, tuple(specs), tuple(piece for entry in entries for piece in entry.pieces))


def _held(tensors: Mapping[str, Holding], rank: int) -> Iterator[_Held]:
    """What this process holds a part of, even an empty one."""
    for name, holding in tensors.items():
        if isinstance(holding, Local):
            local, layout = holding.tensor.detach(), holding.layout
            yield _Held(name, layout.shape, local, pieces_of_local(name, local, layout, rank))
            continue
        part, pieces = local_part(name, holding.detach())
        if part is not None:
            yield _Held(name, tuple(holding.shape), part, pieces)
