"""Megatron-core shards <-> boxes of checkpoint tensors, by the one table in `naming_table`. Pure.

A Megatron parameter is described by its key, its global shape and the box of it that a rank holds, exactly as
`sharded_state_dict()` gives them. A tensor-parallel shard is a row range of a fused parameter, wherever it cuts: with
fewer KV heads than tensor-parallel ranks, some ranks hold no row of k or v.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.fused import RowRange, split_rows
from refit_transport.layout.manifest import Manifest, TensorSpec
from refit_transport.layout.presets.cuts import FusedRows
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.layout.presets.rows import Packing
from refit_transport.sources.naming_table import TABLE, Row, Scope

_LAYER_KEY = re.compile(r"^decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)$")
_DRAFTER_KEY = re.compile(r"^mtp\.layers\.(?P<layer>\d+)\.(?P<inner>transformer_layer\.)?(?P<rest>.+)$")
_LAYER_NAME = re.compile(r"^(?:.+\.)?layers\.(?P<layer>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of one Megatron parameter.

    `box` lies in `global_shape`; its first `prepended` dims (layer, expert) have size 1 and don't exist in the local
    tensor. `rank` is for errors.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    prepended: int = 0
    rank: int = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a checkpoint tensor and the box of the local tensor (its own dims, from 0) that holds it.

    `dims` gives for each dim of `box` the local dim, -1 where the local tensor has none.
    """

    tensor: str
    shape: tuple[int, ...]
    box: Box
    local: Box
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Home:
    """Rows of a checkpoint tensor in the unsharded Megatron parameter `key`; `layer` is -1 outside the layers."""

    key: str
    layer: int
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor or parameter stands: outside of the layers (-1), in a layer, or in a drafter's layer, from 0."""

    drafter: bool
    layer: int

    def has(self, scope: Scope) -> bool:
        return {"model": self.layer < 0, "layer": self.layer >= 0, "drafter": self.drafter}[scope]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a parameter: the tensor, and how many rows it has here. `packing` None: all of the tensor's rows.

    Of fields in turn, `field` is an index of the tensor's last dim, which the parameter lacks.
    """

    tensor: LogicalTensor
    rows: int
    packing: Packing | None = None
    field: int = 0

    @classmethod
    def of(cls, tensor: LogicalTensor, number: int | None) -> Self:
        packing = tensor.row.packing
        if number is None or packing is None:
            return cls(tensor, tensor.shape[row_dim(tensor)], field=number or 0)
        return cls(tensor, packing.units * packing.fields[number], packing, number)

    def in_tensor(self, found: RowRange) -> Iterator[RowRange]:
        """A range of the part's own rows as ranges of the tensor's: a packed field is cut at its units.

        >>> from refit_transport.layout.presets import rows
        >>> row = rows.Row("w", (10, 3), "other", packing=Packing(0, (2, 3), units=2))
        >>> part = _Part.of(LogicalTensor(row, "first"), 1)
        >>> [(rows.start, rows.fused, rows.size) for rows in part.in_tensor(RowRange(0, 1, 7, 5))]
        [(3, 7, 2), (7, 9, 3)]
        """
        if self.packing is None:
            yield found
            return
        size, unit = self.packing.fields[self.field], sum(self.packing.fields)
        first = sum(self.packing.fields[: self.field])
        start, stop = found.start, found.start + found.size
        while start < stop:
            count, inside = divmod(start, size)
            taken = min(size - inside, stop - start)
            yield RowRange(found.part, count * unit + first + inside, found.fused + start - found.start, taken)
            start += taken


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A row of the table, read for one place of one model."""

    row: Row
    parts: tuple[_Part, ...]
    groups: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape in Megatron, without the layer's dim."""
        tensor = self.parts[0].tensor
        shape = list(_swapped(tensor, tensor.shape[: len(tensor.shape) - tensor.row.in_turn]))
        shape[self.row_dim] = sum(part.rows for part in self.parts)
        return tuple(shape)

    @property
    def row_dim(self) -> int:
        """Megatron's dim of rows: experts are counted in front of it."""
        return int(self.parts[0].tensor.row.experts)

    def ranges(self, window: Span) -> Iterator[RowRange]:
        """The tensors' rows that lie in a window of the parameter's."""
        part_rows = tuple(part.rows for part in self.parts)
        for found in split_rows(part_rows, groups=self.groups, window=window):
            yield from self.parts[found.part].in_tensor(found)


@dataclass(slots=True)
class Naming:
    """The table as it reads for one model."""

    model: LogicalModel
    _tensors: dict[_Place, dict[str, LogicalTensor]] = field(default_factory=dict)
    _known: dict[tuple[_Place, Scope, str], _Parameter | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drafters: dict[int, int] = {}
        for tensor in self.model.tensors:
            if tensor.part != "vision":
                where, inner = _place_of(tensor, drafters)
                self._tensors.setdefault(where, {})[inner] = tensor

    def place(self, shard: Shard, *, drafts: bool = False) -> tuple[Placed, ...]:
        """The checkpoint tensors that a shard holds something of, and where. `drafts`: also as a drafter's own copy.

        Raises:
            LayoutError: no row of the table explains the key for this model, or the sizes disagree with the model's.
        """
        parameter, first = self._explained(shard), self._read(shard)[3]
        _check_shape(parameter, shard, first)
        found = tuple(_placed(parameter, shard, first))
        if not drafts or not parameter.row.shared_as:
            return found
        name = parameter.row.shared_as
        copies = [tensors[name].name for where, tensors in self._tensors.items() if where.drafter and name in tensors]
        return (*found, *(replace(placed, tensor=copy) for copy in copies for placed in found))

    def shape(self, key: str) -> tuple[int, ...]:
        """The global shape of a parameter by a key that has the layer's number in it.

        Raises:
            LayoutError: no row of the table explains the key for this model.
        """
        return self._explained(Shard(key, (), Box(()))).shape

    def shift(self, shard: Shard, *, zero_centered: bool) -> int:
        """What a norm's elements in the checkpoint are more than in Megatron, whose norms are zero-centred or not."""
        parameter = self._explained(shard)
        if not parameter.row.recentred or parameter.parts[0].tensor.row.group != "norm":
            return 0
        return int(zero_centered) - int(parameter.parts[0].tensor.row.zero_centered)

    def flagged(self, shard: Shard) -> bool:
        """Whether Megatron's modules always say at the parameter that tensor parallelism cuts it."""
        return self._explained(shard).row.flagged

    def homes(self, tensor: str) -> tuple[Home, ...]:
        """The other direction: the Megatron parameters that hold a checkpoint tensor (canonical name), and its rows.

        A drafter's layers are counted from 0, and its keys don't begin with `decoder.layers`.

        Raises:
            LayoutError: the model has no such tensor, or the table no parameter for it.
        """
        for where, tensors in self._tensors.items():
            for inner, known in tensors.items():
                if known.name == tensor:
                    found = tuple(self._homes(where, inner))
                    if found:
                        return found
        expected = f"a tensor of {self.model.architecture} that Megatron has"
        raise LayoutError(tensor, -1, expected, "a name that the naming table doesn't know")

    def _homes(self, where: _Place, inner: str) -> Iterator[Home]:
        for row in TABLE:
            if row.shared_as and where.drafter and row.shared_as == inner:
                yield from (
                    replace(home, layer=where.layer) for home in self._homes(_Place(False, -1), row.parts[0].name)
                )
            if inner not in (part.name for part in row.parts) or not where.has(row.scope):
                continue
            parameter = self._parameter(where, row.scope, row.keys[0])
            if parameter is None or parameter.row is not row:
                continue
            mine = parameter.ranges(Span(0, parameter.shape[parameter.row_dim]))
            names = [part.tensor.name for part in parameter.parts]
            name = self._tensors[where][inner].name
            ranges = tuple(found for found in mine if names[found.part] == name)
            yield Home(_key(where, row), where.layer, ranges)

    def _read(self, shard: Shard) -> tuple[_Place, Scope, str, int]:
        """Where a key stands, its scope, its spelling there, and how many prepended dims the layer has."""
        drafter = _DRAFTER_KEY.match(shard.key)
        if drafter is not None:
            return _Place(True, int(drafter["layer"])), "layer" if drafter["inner"] else "drafter", drafter["rest"], 0
        match = _LAYER_KEY.match(shard.key)
        if match is None:
            return _Place(False, -1), "model", shard.key, 0
        if match["layer"] is not None:
            return _Place(False, int(match["layer"])), "layer", match["rest"], 0
        # Layers that are alike have their number as a prepended dim.
        if shard.global_shape[0] != self.model.layers:
            expected, got = f"{self.model.layers} layers (model config)", f"{shard.global_shape[0]} (Megatron)"
            raise LayoutError(shard.key, shard.rank, expected, got)
        return _Place(False, shard.box.offset[0]), "layer", match["rest"], 1

    def _explained(self, shard: Shard) -> _Parameter:
        where, scope, inner, _ = self._read(shard)
        parameter = self._parameter(where, scope, inner)
        if parameter is None:
            expected = f"a Megatron key that the naming table explains for {self.model.architecture}"
            raise LayoutError(shard.key, shard.rank, expected, repr(shard.key))
        return parameter

    def _parameter(self, where: _Place, scope: Scope, inner: str) -> _Parameter | None:
        key = (where, scope, inner)
        if key not in self._known:
            tensors = self._tensors.get(where, {})
            rows = (row for row in TABLE if row.scope == scope and inner in row.keys)
            found = (_parameter(row, tensors) for row in rows)
            self._known[key] = next((parameter for parameter in found if parameter is not None), None)
        return self._known[key]


def _place_of(tensor: LogicalTensor, drafters: dict[int, int]) -> tuple[_Place, str]:
    """The tensor's place and its name there. Drafters' layers are numbered on in some checkpoints, anew in others."""
    if tensor.part == "main" and tensor.home != "layer":
        return _Place(False, -1), tensor.name.rpartition("model.")[2].removeprefix("backbone.")
    match = _LAYER_NAME.match(tensor.name)
    if tensor.part == "main" and match is not None:
        return _Place(False, tensor.layer), match["rest"]
    if match is None:
        return _Place(True, 0), tensor.name
    return _Place(True, drafters.setdefault(int(match["layer"]), len(drafters))), match["rest"]


def _parameter(row: Row, tensors: dict[str, LogicalTensor]) -> _Parameter | None:
    """None where the row doesn't apply: a tensor, or a field of it, isn't there."""
    if row.beside and row.beside not in tensors:
        return None
    parts = []
    for part in row.parts:
        tensor = tensors.get(part.name)
        if tensor is None:
            return None
        if part.field is not None and part.field >= _fields(tensor):
            return None
        parts.append(_Part.of(tensor, part.field))
    fused = parts[0].tensor.row.trained
    groups = fused.groups.units if row.grouped and isinstance(fused, FusedRows) else 1
    return _Parameter(row, tuple(parts), groups)


def _fields(tensor: LogicalTensor) -> int:
    """How many things a checkpoint packs in the tensor, or has in turn there; 0 where it is one thing."""
    if tensor.row.in_turn:
        return tensor.shape[-1]
    return 0 if tensor.row.packing is None else len(tensor.row.packing.fields)


def row_dim(tensor: LogicalTensor) -> int:
    """The dim of a checkpoint tensor whose elements are rows in Megatron: a linear layer's outputs."""
    return int(tensor.row.experts) + int(tensor.row.inputs_first)


def _swapped(tensor: LogicalTensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The dims, without that of fields in turn, as Megatron has them: a linear layer's outputs first."""
    return (*dims[:-2], dims[-1], dims[-2]) if tensor.row.inputs_first else dims


def _check_shape(parameter: _Parameter, shard: Shard, first: int) -> None:
    expected, got = parameter.shape, shard.global_shape[first:]
    same = len(got) == len(expected) and all(
        mine == theirs or (parameter.row.padded and dim == parameter.row_dim and mine > theirs)
        for dim, (mine, theirs) in enumerate(zip(got, expected, strict=True))
    )
    prepended = shard.prepended - first
    # A stack of experts is one local tensor where the experts are one parameter.
    if not same or prepended not in {0, parameter.row_dim}:
        raise LayoutError(
            shard.key,
            shard.rank,
            f"global shape {list(expected)} with {parameter.row_dim} prepended (model config)",
            f"{list(got)} with {prepended} (Megatron)",
        )


def _placed(parameter: _Parameter, shard: Shard, first: int) -> Iterator[Placed]:
    spans, missing = shard.box.spans[first:], shard.prepended - first
    window = spans[parameter.row_dim]
    for found in parameter.ranges(window):
        part = parameter.parts[found.part]
        tensor = part.tensor
        held, local = list(spans), [Span(0, span.size) for span in spans]
        held[parameter.row_dim] = Span(found.start, found.start + found.size)
        start = found.fused - window.start
        local[parameter.row_dim] = Span(start, start + found.size)
        if tensor.row.inputs_first:
            held[-2:] = held[:-3:-1]
        dims = _swapped(tensor, tuple(max(-1, dim - missing) for dim in range(len(spans))))
        if tensor.row.in_turn:
            held.append(Span(part.field, part.field + 1))
            dims = (*dims, -1)
        yield Placed(tensor.name, tensor.shape, Box(tuple(held)), Box(tuple(local[missing:])), dims)


def _key(where: _Place, row: Row) -> str:
    if row.scope == "model":
        return row.keys[0]
    if not where.drafter:
        return f"decoder.layers.{row.keys[0]}"
    return f"mtp.layers.{'' if row.scope == 'drafter' else 'transformer_layer.'}{row.keys[0]}"


def expected_tensors(model: LogicalModel, *, dtype: str) -> Iterator[TensorSpec]:
    """Every logical tensor that a refit of the model moves, without drafter."""
    for tensor in model.main:
        yield TensorSpec(tensor.name, tensor.shape, dtype)


def check_complete(manifest: Manifest, model: LogicalModel) -> None:
    """Proves that the joined ranks hold something of every tensor that the model has; of a drafter, of all or nothing.

    Raises:
        LayoutError: whole layers are missing (they are named), or single tensors are.
    """
    held = frozenset(spec.name for spec in manifest.tensors)
    layers = frozenset(tensor.layer for tensor in model.main if tensor.name in held)
    lost = [layer for layer in range(model.layers) if layer not in layers]
    if lost:
        raise LayoutError("", -1, f"layers 0 to {model.layers - 1}", f"no rank that holds layers {lost}")
    drafts = any(tensor.part == "drafter" and tensor.name in held for tensor in model.tensors)
    for tensor in model.tensors:
        if tensor.name not in held and (tensor.part == "main" or (drafts and tensor.part == "drafter")):
            raise LayoutError(tensor.name, -1, "a rank that holds it", "none")
