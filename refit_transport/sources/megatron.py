"""A Megatron-core model as a refit source: it describes itself through `sharded_state_dict()`, we translate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.layout.model_shape import ModelShape
from refit_transport.layout.pieces import merge_pieces
from refit_transport.sources.naming import Placed, Shard, place


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a tensor's first element lies: element `offset` of the buffer `name`, the parameter `parameter`."""

    name: str
    parameter: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class _LiveTensors:
    """A chunk's parameters and buffers by address.

    Two parameters may share a storage (Megatron's DDP packs them), so the address tells them apart, not the storage.
    """

    addresses: tuple[int, ...]
    named: tuple[tuple[str, torch.Tensor], ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Self:
        ordered = sorted(named, key=lambda pair: pair[1].data_ptr())
        return cls(tuple(tensor.data_ptr() for _, tensor in ordered), tuple(ordered))

    def locate(self, data: torch.Tensor) -> _Location | None:
        """The tensor that `data` is a view of; None when there is none."""
        index = bisect_right(self.addresses, data.data_ptr()) - 1
        if index < 0:
            return None
        name, tensor = self.named[index]
        distance = data.data_ptr() - tensor.data_ptr()
        if distance >= tensor.nbytes or data.dtype != tensor.dtype or data.device != tensor.device:
            return None
        return _Location(name, tensor, distance // tensor.element_size())


class MegatronSource:
    """The shards that one Megatron rank holds, as views into its live parameters.

    `chunks` are this rank's model chunks in virtual-pipeline order (one without interleaving), wrapped or not; `model`
    is what the checkpoint's config says. Buffers are named `<chunk index>.<parameter name>`.
    """

    def __init__(self, chunks: Sequence[nn.Module], model: ModelShape) -> None:
        self._chunks = tuple(_unwrap(chunk) for chunk in chunks)
        self._model = model

    def manifest(self, rank: int) -> RankManifest:
        """Describes this process's parameters as refit rank `rank`. Not collective.

        Raises:
            LayoutError: a parameter that the naming table doesn't explain, sizes that contradict the model config or
                the parameter's own tensor-parallel flags, or a tensor that isn't a view of a live parameter.
        """
        specs: dict[str, TensorSpec] = {}
        pieces: list[Piece] = []
        for index, chunk in enumerate(self._chunks):
            live = _LiveTensors.of(_named_tensors(chunk, index))
            for sharded in _sharded_tensors(chunk):
                location = live.locate(sharded.data)
                if location is None:
                    raise LayoutError(sharded.key, rank, "a view of a live parameter or buffer", "other storage")
                _check_flags(sharded, location.parameter, rank)
                shard = Shard(
                    sharded.key,
                    tuple(sharded.global_shape),
                    Box.at(sharded.global_offset, (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)),
                    sharded.prepend_axis_num,
                )
                dtype = str(sharded.data.dtype).removeprefix("torch.")
                for placed in place(shard, self._model):
                    specs[placed.tensor] = TensorSpec(placed.tensor, placed.shape, dtype)
                    pieces.append(_piece(placed, location, sharded.data))
        return RankManifest(rank, "source", tuple(specs.values()), merge_pieces(pieces))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The parameters (and persistent buffers) as they are now, without autograd."""
        return {
            name: tensor.detach() for i, chunk in enumerate(self._chunks) for name, tensor in _named_tensors(chunk, i)
        }


def _unwrap(chunk: nn.Module) -> nn.Module:
    """Megatron's DDP and Float16Module keep the model they wrap in `module`."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _named_tensors(chunk: nn.Module, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in chunk.named_parameters():
        yield f"{index}.{name}", parameter
    for name, buffer in chunk.named_buffers():
        yield f"{index}.{name}", buffer


def _sharded_tensors(chunk: nn.Module) -> Iterator[ShardedTensor]:
    """What the chunk says that it holds; objects that aren't tensors (extra states) carry no weights."""
    for entry in chunk.sharded_state_dict().values():  # type: ignore[operator]
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        for sharded in built if isinstance(built, list) else [built]:
            if isinstance(sharded, ShardedTensor):
                yield sharded


def _check_flags(sharded: ShardedTensor, parameter: torch.Tensor, rank: int) -> None:
    """A shard cut along a dim must be flagged so; the flags drive Megatron's own gradient handling."""
    cuts = tuple(sharded.axis_fragmentations or ())[sharded.prepend_axis_num :]
    flagged = bool(getattr(parameter, "tensor_model_parallel", False))
    flagged_dim = getattr(parameter, "partition_dim", None)
    for dim, count in enumerate(cuts):
        local, whole = sharded.local_shape[dim], sharded.global_shape[sharded.prepend_axis_num + dim]
        if local * count != whole:
            raise LayoutError(sharded.key, rank, f"{count} shards of {whole} in dim {dim}", f"a shard of {local}")
        # A gated pair is one parameter with two parts, each counted as a shard of its own.
        if local < whole and parameter.shape[dim] < whole and not (flagged and flagged_dim in (None, -1, dim)):
            raise LayoutError(
                sharded.key,
                rank,
                f"a parameter flagged as tensor-parallel in dim {dim} (local {local} of {whole})",
                f"tensor_model_parallel={flagged}, partition_dim={flagged_dim}",
            )


def _piece(placed: Placed, location: _Location, data: torch.Tensor) -> Piece:
    start = sum(offset * stride for offset, stride in zip(placed.local.offset, data.stride(), strict=True))
    # The prepended dims have one element; any stride is right, this one keeps the view's bounds inside the tensor.
    prepended = (1,) * (len(placed.box.spans) - data.dim())
    return Piece(placed.tensor, placed.box, location.name, location.offset + start, prepended + data.stride())
