"""A Megatron-core model as a refit source: it describes itself through `sharded_state_dict()`, we translate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.layout.pieces import merge_pieces
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.region import merge_boxes
from refit_transport.sources.naming import Naming, Placed, Shard


@dataclass(frozen=True, slots=True)
class _Live:
    """A chunk's parameter or buffer under its name as a refit buffer."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _LiveTensors:
    """A chunk's parameters and buffers by address.

    Two parameters may share a storage (Megatron's DDP packs them), so the address tells them apart, not the storage.
    """

    addresses: tuple[int, ...]
    tensors: tuple[_Live, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Self:
        ordered = sorted(named, key=lambda pair: pair[1].data_ptr())
        return cls(tuple(tensor.data_ptr() for _, tensor in ordered), tuple(_Live(*pair) for pair in ordered))

    def locate(self, data: torch.Tensor) -> _Memory | None:
        """Where `data` lies in the tensor that it is a view of; None when there is none."""
        index = bisect_right(self.addresses, data.data_ptr()) - 1
        if index < 0:
            return None
        live = self.tensors[index]
        distance = data.data_ptr() - live.tensor.data_ptr()
        if distance >= live.tensor.nbytes or data.dtype != live.tensor.dtype or data.device != live.tensor.device:
            return None
        return _Memory(live, distance // live.tensor.element_size(), data.stride())


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor that a chunk says it holds, and the factory that made it of a parameter, if one did."""

    sharded: ShardedTensor
    factory: ShardedTensorFactory | None
    number: int

    def shard(self, rank: int) -> Shard:
        sharded, prepended = self.sharded, self.sharded.prepend_axis_num
        box = Box.at(sharded.global_offset, (1,) * prepended + tuple(sharded.local_shape))
        return Shard(sharded.key, tuple(sharded.global_shape), box, prepended, rank)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where a described tensor's elements lie: from element `offset` of a live tensor, `strides` apart."""

    live: _Live
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shifted:
    """A copy of the buffer `of` whose elements are larger by `by`."""

    of: str
    by: int
    copy: torch.Tensor


class MegatronSource:
    """The shards that one Megatron rank holds, as views into its live parameters.

    `chunks` are this rank's model chunks in virtual-pipeline order (one without interleaving), wrapped or not; `model`
    is what the checkpoint's config says. Buffers are named `<chunk index>.<parameter name>`. Norms that Megatron stores
    less 1 and the checkpoint doesn't, or the reverse, are sent from copies, which are brought up to date by `buffers`.
    """

    def __init__(self, chunks: Sequence[nn.Module], model: LogicalModel) -> None:
        self._chunks = tuple(_unwrap(chunk) for chunk in chunks)
        self._naming = Naming(model)
        self._shifted: dict[str, _Shifted] = {}

    def manifest(self, rank: int) -> RankManifest:
        """Describes this process's parameters as refit rank `rank`. Not collective.

        Raises:
            LayoutError: a parameter that the naming table doesn't explain or that the model doesn't describe, sizes
                that contradict the model config or the parameter's own tensor-parallel flags, a tensor that isn't a
                view of a live parameter, or one that is held twice.
        """
        specs: dict[str, TensorSpec] = {}
        pieces: list[Piece] = []
        described = [list(_described(chunk)) for chunk in self._chunks]
        drafts = any(each.sharded.key.startswith("mtp.") for found in described for each in found)
        for index, (chunk, found) in enumerate(zip(self._chunks, described, strict=True)):
            live = _LiveTensors.of(_named_tensors(chunk, index))
            zero_centered = bool(getattr(getattr(chunk, "config", None), "layernorm_zero_centered_gamma", False))
            flagging = _flagging(chunk)
            seen: dict[str, int] = {}
            for each in found:
                memory, shard = _memory(each, live, rank), each.shard(rank)
                seen[memory.live.name] = seen.get(memory.live.name, 0) + each.sharded.data.numel()
                placed_here = self._naming.place(shard, drafts=drafts)
                _check_cut(each.sharded, rank)
                if self._naming.flagged(shard) or id(memory.live.tensor) in flagging:
                    _check_flags(each.sharded, memory.live.tensor, rank)
                shift = self._naming.shift(shard, zero_centered=zero_centered)
                memory = self._copy(memory, shift) if shift else memory
                dtype = str(each.sharded.data.dtype).removeprefix("torch.")
                for placed in placed_here:
                    specs[placed.tensor] = TensorSpec(placed.tensor, placed.shape, dtype)
                    pieces.append(_piece(placed, memory))
            _check_described(chunk, index, seen, rank)
        merged = merge_pieces(pieces)
        _check_once(merged, rank)
        return RankManifest(rank, "source", tuple(specs.values()), merged)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The parameters (and persistent buffers) as they are now, without autograd."""
        found = {
            name: tensor.detach() for i, chunk in enumerate(self._chunks) for name, tensor in _named_tensors(chunk, i)
        }
        for name, shifted in self._shifted.items():
            torch.add(found[shifted.of], shifted.by, out=shifted.copy)
            found[name] = shifted.copy
        return found

    def copies(self) -> Collection[str]:
        """The buffers that are copies of parameters which Megatron stores in another form."""
        return self._shifted.keys()

    def stored_in(self, buffer: str) -> str:
        """The parameter whose elements a buffer of this source holds: itself, or the one that it is a copy of."""
        return self._shifted[buffer].of if buffer in self._shifted else buffer

    def stored(self, copies: Mapping[str, torch.Tensor], /) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """For each copy with these values: its parameter's buffer name, the parameter, and what that has to store."""
        live = {name: tensor for i, chunk in enumerate(self._chunks) for name, tensor in _named_tensors(chunk, i)}
        for name, values in copies.items():
            shifted = self._shifted[name]
            yield shifted.of, live[shifted.of].detach(), values - shifted.by

    def write_back(self) -> None:
        """Gives the parameters what was written into their copies among `buffers`."""
        for _, parameter, values in self.stored({name: shifted.copy for name, shifted in self._shifted.items()}):
            parameter.copy_(values)

    def _copy(self, memory: _Memory, shift: int) -> _Memory:
        name = f"{memory.live.name}{shift:+d}"
        if name not in self._shifted:
            copy = torch.empty_like(memory.live.tensor.detach())
            self._shifted[name] = _Shifted(memory.live.name, shift, copy)
        return replace(memory, live=_Live(name, self._shifted[name].copy))


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


# Without metadata, a stage that only drafts fails in Megatron. The group would number replicas, which nobody asks here.
_METADATA = {"dp_cp_group": None}


def _described(chunk: nn.Module) -> Iterator[_Described]:
    """What the chunk says that it holds; objects that aren't tensors (extra states) carry no weights."""
    for entry in chunk.sharded_state_dict(metadata=_METADATA).values():  # type: ignore[operator]
        factory = entry if isinstance(entry, ShardedTensorFactory) else None
        for number, sharded in enumerate(_built(entry.build()) if factory else [entry]):
            if isinstance(sharded, ShardedTensor):
                yield _Described(sharded, factory, number)


def _built(built: object) -> list[object]:
    return built if isinstance(built, list) else [built]


def _memory(described: _Described, live: _LiveTensors, rank: int) -> _Memory:
    """Where the described elements lie. A factory may have copied them: then it is asked where it takes them from.

    Megatron's stacked experts (`weight1`, `weight2`) are described by a copy of a transposed view. Built of the
    parameter's own element numbers, it says which elements these are.

    Raises:
        LayoutError: no live tensor holds them, or they don't lie at even distances.
    """
    sharded, factory = described.sharded, described.factory
    found = live.locate(sharded.data)
    if found is not None:
        return found
    whole = None if factory is None else live.locate(factory.data)
    if factory is None or whole is None or factory.data.numel() != whole.live.tensor.numel():
        raise LayoutError(sharded.key, rank, "a view of a live parameter or buffer", "other storage")
    numbers = torch.arange(factory.data.numel()).view(factory.data.shape)
    built = _built(factory.build_fn(factory.key, numbers, factory.replica_id, factory.flattened_range))
    taken = built[described.number].data  # type: ignore[attr-defined]
    first, strides = taken[(0,) * taken.dim()], _steps(taken)
    even = sum(torch.meshgrid(*_multiples(taken.shape, strides), indexing="ij"), first)
    if not torch.equal(taken, even):
        raise LayoutError(sharded.key, rank, "a strided view of a live parameter", "elements at uneven distances")
    return _Memory(whole.live, int(first), strides)


def _steps(numbers: torch.Tensor) -> tuple[int, ...]:
    """How much the numbers grow along each dim, at its beginning; 1 where a dim has one element."""
    corner = (0,) * (numbers.dim() - 1)
    return tuple(
        int(numbers.select(dim, 1)[corner] - numbers.select(dim, 0)[corner]) if size > 1 else 1
        for dim, size in enumerate(numbers.shape)
    )


def _multiples(shape: Iterable[int], strides: Iterable[int]) -> list[torch.Tensor]:
    return [torch.arange(size) * stride for size, stride in zip(shape, strides, strict=True)]


def _check_described(chunk: nn.Module, index: int, seen: Mapping[str, int], rank: int) -> None:
    """A parameter that the model doesn't describe, or only in part, would stay behind unnoticed."""
    for name, parameter in chunk.named_parameters():
        got = seen.get(f"{index}.{name}", 0)
        if got != parameter.numel():
            expected = f"all {parameter.numel()} elements of the parameter in sharded_state_dict()"
            raise LayoutError(name, rank, expected, f"{got} of them")


def _check_once(pieces: Iterable[Piece], rank: int) -> None:
    """Two parameters that claim one element could differ, and nothing says which one counts."""
    held: dict[str, list[Piece]] = {}
    for piece in pieces:
        held.setdefault(piece.tensor, []).append(piece)
    for tensor, mine in held.items():
        if len(mine) < 2:
            continue
        corners = np.array([[(span.start, span.stop) for span in piece.box.spans] for piece in mine], dtype=np.int64)
        distinct = merge_boxes(corners)
        if (distinct[..., 1] - distinct[..., 0]).prod(axis=1).sum() != sum(piece.box.numel for piece in mine):
            buffers = ", ".join(dict.fromkeys(piece.buffer for piece in mine))
            raise LayoutError(tensor, rank, "each element in one parameter", f"some twice, among {buffers}")


def _check_cut(sharded: ShardedTensor, rank: int) -> None:
    """As many shards as Megatron says make up the whole."""
    for dim, count in enumerate(tuple(sharded.axis_fragmentations or ())[sharded.prepend_axis_num :]):
        local, whole = sharded.local_shape[dim], sharded.global_shape[sharded.prepend_axis_num + dim]
        if local * count != whole:
            raise LayoutError(sharded.key, rank, f"{count} shards of {whole} in dim {dim}", f"a shard of {local}")


def _flagging(chunk: nn.Module) -> set[int]:
    """The parameters, by id, of Megatron's own tensor-parallel layers, which flag what they cut, also in experts."""
    layers = (each for each in chunk.modules() if isinstance(each, (ColumnParallelLinear, RowParallelLinear)))
    return {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}


def _check_flags(sharded: ShardedTensor, parameter: torch.Tensor, rank: int) -> None:
    """A shard cut along a dim must be flagged so; the flags drive Megatron's own gradient handling."""
    flagged = bool(getattr(parameter, "tensor_model_parallel", False))
    flagged_dim = getattr(parameter, "partition_dim", None)
    for dim, local in enumerate(sharded.local_shape):
        whole = sharded.global_shape[sharded.prepend_axis_num + dim]
        # A gated pair is one parameter with two parts, each counted as a shard of its own.
        if local < whole and parameter.shape[dim] < whole and not (flagged and flagged_dim in (None, -1, dim)):
            raise LayoutError(
                sharded.key,
                rank,
                f"a parameter flagged as tensor-parallel in dim {dim} (local {local} of {whole})",
                f"tensor_model_parallel={flagged}, partition_dim={flagged_dim}",
            )


def _piece(placed: Placed, memory: _Memory) -> Piece:
    start = sum(offset * stride for offset, stride in zip(placed.local.offset, memory.strides, strict=True))
    # Dims that the local tensor lacks have one element: any stride is right, and 1 keeps the view inside the tensor.
    strides = tuple(1 if dim < 0 else memory.strides[dim] for dim in placed.dims)
    return Piece(placed.tensor, placed.box, memory.live.name, memory.offset + start, strides)
