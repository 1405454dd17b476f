"""State dicts of DTensors (FSDP2, tensor parallel, or both) describe themselves: a source or a target without tables.

Names are canonical (see `layout.canonical`), or those of a transformers module where the model is given. What is no
DTensor is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.canonical import canonical_name, stacks_in_turn
from refit_transport.layout.layout import Layout
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.pieces import split_last
from refit_transport.layout.placement import Placement, Replicate, Shard, StridedShard
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.module_names import ModuleNames

StateDict = Mapping[str, torch.Tensor]


def layout_of(tensor: DTensor, *, name: str = "") -> Layout:
    """The DTensor's layout; its ranks are those of its device mesh. `name` is for errors.

    Raises:
        LayoutError: a `Partial` placement (reduce it first), or one that isn't known here.
    """
    device_mesh = tensor.device_mesh
    axes = device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(device_mesh.ndim))
    mesh = Mesh.from_ranks(axes, device_mesh.mesh.shape, device_mesh.mesh.flatten().tolist())
    placements = (_placement(p, axis, name) for p, axis in zip(tensor.placements, axes, strict=True))
    return Layout(tuple(tensor.shape), mesh, tuple(placements))


def _placement(placement: TorchPlacement, axis: str, name: str) -> Placement:
    if isinstance(placement, _StridedShard):
        return StridedShard(placement.dim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return Replicate()
    got = f"{placement} (its ranks hold addends: reduce it first)" if isinstance(placement, TorchPartial) else ""
    raise LayoutError(name, -1, f"shards or Replicate on axis {axis}", got or f"the unknown {placement!r}")


def source_of(state: StateDict | Callable[[], StateDict], *, model: LogicalModel | None = None) -> StateDictSource:
    """This process's part of a state dict as a refit source; a callable is asked anew for each refit.

    `source_of(module.state_dict)` follows a module, FSDP2's included, whose storage may be rebound. With `model` (see
    `LogicalModel.from_config`) names and stacked experts are those of the transformers module, which must have exactly
    the model's tensors; those of a vision tower are left out.
    """
    return StateDictSource(_getter(state), None if model is None else ModuleNames.of(model))


def _getter(state: StateDict | Callable[[], StateDict]) -> Callable[[], StateDict]:
    return state if callable(state) else lambda: state


@dataclass(frozen=True, slots=True)
class _Held:
    """One entry of a state dict as this process holds it."""

    name: str
    spec: TensorSpec
    local: torch.Tensor
    pieces: tuple[Piece, ...]


class StateDictSource:
    """Implements `sources.base.Source`. Buffers are named as in the state dict and are the local tensors themselves."""

    def __init__(self, state: Callable[[], StateDict], names: ModuleNames | None = None) -> None:
        self._state, self._names = state, names

    def manifest(self, rank: int) -> RankManifest:
        """Describes this process's local tensors as refit rank `rank`.

        Raises:
            LayoutError: a partial tensor, a local tensor whose shape contradicts its layout, an expert that is missing;
                with a model, a tensor that it doesn't have or that the module lacks, or sizes that disagree.
        """
        return _manifest(rank, list(self._held(rank)))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The local tensors as they are now, without autograd."""
        return {held.name: held.local for held in self._held(-1)}

    def copies(self) -> Collection[str]:
        """None: the tensors are the live ones."""
        return ()

    def stored(self, _: Mapping[str, torch.Tensor], /) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """None, as there are no copies."""
        return iter(())

    def _held(self, rank: int) -> Iterator[_Held]:
        return _held(self._state()) if self._names is None else _held_by_module(self._state(), self._names, rank)


def _manifest(rank: int, entries: Iterable[_Held]) -> RankManifest:
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    for held in entries:
        if specs.setdefault(held.spec.name, held.spec) != held.spec:
            raise LayoutError(held.name, rank, str(specs[held.spec.name]), str(held.spec))
        pieces += held.pieces
    return RankManifest(rank, "source", tuple(specs.values()), tuple(pieces))


def _held(state: StateDict) -> Iterator[_Held]:
    """The entries that this process holds a part of, even an empty one."""
    experts, in_turn = _expert_counts(state), stacks_in_turn(state)
    for name, tensor in state.items():
        local, pieces = local_part(name, tensor.detach())
        if local is None:
            continue
        found, shape = canonical_name(name), tuple(tensor.shape)
        if found.expert is not None:
            shape = (experts[found.tensor], *shape)
            pieces = tuple(_stacked(piece, found.tensor, found.expert) for piece in pieces)
        elif name in in_turn:
            shape = (*shape[:-1], shape[-1] // 2, 2)
            pieces = tuple(split for piece in pieces for split in split_last(piece, 2))
        yield _Held(name, TensorSpec(found.tensor, shape, str(local.dtype).removeprefix("torch.")), local, pieces)


def _held_by_module(state: StateDict, names: ModuleNames, rank: int) -> Iterator[_Held]:
    """As `_held`, of a transformers module: an entry gives one for each canonical tensor in it."""
    names.check_all(state, rank)
    kept = [(name, tensor.detach()) for name, tensor in state.items() if name not in names.left_out]
    known = {_memory_of(tensor) for name, tensor in kept if name in names.entries}
    for name, tensor in kept:
        if name not in names.entries and _memory_of(tensor) in known:
            continue  # A tied head under a name of its own.
        entry = names.check_shape(name, tuple(tensor.shape), rank)
        local, pieces = local_part(name, tensor)
        if local is None:
            continue
        parts = entry.parts(pieces)
        for spec in entry.specs(str(local.dtype).removeprefix("torch.")):
            yield _Held(name, spec, local, tuple(piece for piece in parts if piece.tensor == spec.name))


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, tuple[Piece, ...]]:
    """The local tensor, None outside of the DTensor's mesh, and its pieces.

    Raises:
        LayoutError: a partial tensor, or a local tensor whose shape contradicts the layout.
    """
    if not isinstance(tensor, DTensor):
        return tensor, (Piece(name, Box.full(tensor.shape), name, 0, tensor.stride()),) if tensor.numel() else ()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None, ()
    layout, local = layout_of(tensor, name=name), tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    rank = int(tensor.device_mesh.mesh[tuple(coordinate)])
    return local, pieces_of_local(name, local, layout, rank)


def pieces_of_local(name: str, local: torch.Tensor, layout: Layout, rank: int) -> tuple[Piece, ...]:
    """What a rank of the layout's mesh holds in its local tensor, as pieces of the buffer of that name.

    Raises:
        LayoutError: the local tensor's shape contradicts the layout, or the rank isn't in its mesh.
    """
    if rank not in layout.mesh.ranks:
        raise LayoutError(name, rank, f"a rank of the layout's mesh, {list(layout.mesh.ranks)}", str(rank))
    expected = layout.local_shape(rank)
    if tuple(local.shape) != expected:
        cut = f"a local shape {list(expected)} ({list(layout.shape)} placed as {layout.placements})"
        raise LayoutError(name, rank, cut, str(list(local.shape)))
    return layout.pieces(rank, name, buffer=name, strides=local.stride())


def _expert_counts(state: StateDict) -> dict[str, int]:
    """The number of experts of each stacked tensor; every process must name all of them."""
    found: dict[str, set[int]] = {}
    for name in map(canonical_name, state):
        if name.expert is not None:
            found.setdefault(name.tensor, set()).add(name.expert)
    for tensor, numbers in found.items():
        if len(numbers) != max(numbers) + 1:
            raise LayoutError(tensor, -1, f"all experts 0 to {max(numbers)} in the state dict", str(sorted(numbers)))
    return {tensor: len(numbers) for tensor, numbers in found.items()}


def _stacked(piece: Piece, tensor: str, expert: int) -> Piece:
    # One expert: its stride says nothing, and 1 keeps views inside the tensor.
    box = Box((Span(expert, expert + 1), *piece.box.spans))
    return Piece(tensor, box, piece.buffer, piece.offset, (1, *piece.strides))


def _memory_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return _memory(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _memory(local: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return local.data_ptr(), tuple(local.shape), local.stride()
