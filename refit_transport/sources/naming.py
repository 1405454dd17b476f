"""Megatron-core shards <-> boxes of checkpoint tensors, by the one table in `naming_table`. Pure.

A Megatron parameter is described by its key, its global shape and the box of it that a rank holds, exactly as
`sharded_state_dict()` gives them. A tensor-parallel shard is a row range of a fused parameter, wherever it cuts: with
fewer KV heads than tensor-parallel ranks, some ranks hold no row of k or v.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.fused import RowRange, split_rows
from refit_transport.layout.manifest import Manifest, TensorSpec
from refit_transport.layout.model_shape import ModelShape
from refit_transport.sources.naming_table import TABLE, Row

_LAYER_KEY = re.compile(r"^decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<rest>.+)$")
_LAYER_NAME = re.compile(r"^model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of one Megatron parameter.

    `box` lies in `global_shape`; its first `prepended` dims (layer, expert) have size 1 and don't exist in the local
    tensor.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    prepended: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a checkpoint tensor and the box of the local tensor (its own dims, from 0) that holds it."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Home:
    """Where a checkpoint tensor lies in the unsharded Megatron parameter `key`; `layer` is -1 outside the layers."""

    key: str
    layer: int
    ranges: tuple[RowRange, ...]


def place(shard: Shard, model: ModelShape) -> tuple[Placed, ...]:
    """The checkpoint tensors that a shard holds something of, and where.

    Raises:
        LayoutError: no row of the table explains the key for this model, or the sizes disagree with the model's.
    """
    match = _LAYER_KEY.match(shard.key)
    indexed = match is not None and match["layer"] is None
    if match is None:
        layer, inner = -1, shard.key
    else:
        # Layers that differ from each other have their number in the key, not as a prepended axis.
        layer, inner = (shard.box.offset[0] if indexed else int(match["layer"])), match["rest"]
    row = _row_of_key(shard.key, inner, layer, model)
    first = 1 if indexed else 0
    if indexed and shard.global_shape[0] != model.layers:
        raise LayoutError(shard.key, -1, f"{model.layers} layers (model config)", f"{shard.global_shape[0]} (Megatron)")
    _check_shape(row, shard, first, model)
    box = Box(shard.box.spans[first:])
    rows = box.spans[row.row_dim]
    part_rows = tuple(model.size(part.dims[row.row_dim]) for part in row.parts)
    return tuple(
        _placed(row, found, box, rows.start, _full_name(row, found.part, layer), model)
        for found in split_rows(part_rows, groups=model.size(row.groups), window=rows)
    )


def _row_of_key(key: str, inner: str, layer: int, model: ModelShape) -> Row:
    for row in TABLE:
        if inner in row.keys and (row.scope == "model") == (layer < 0) and row.exists(model, layer):
            return row
    raise LayoutError(key, -1, f"a Megatron key that the naming table explains for {model.architecture}", repr(key))


def _check_shape(row: Row, shard: Shard, first: int, model: ModelShape) -> None:
    expected = list(model.dims(row.parts[0].dims))
    expected[row.row_dim] = sum(model.size(part.dims[row.row_dim]) for part in row.parts)
    got = list(shard.global_shape[first:])
    same = len(got) == len(expected) and all(
        mine == theirs or (row.padded and dim == row.row_dim and mine > theirs)
        for dim, (mine, theirs) in enumerate(zip(got, expected, strict=True))
    )
    if not same or shard.prepended - first != row.row_dim:
        raise LayoutError(
            shard.key,
            -1,
            f"global shape {expected} with {row.row_dim} prepended (model config)",
            f"{got} with {shard.prepended - first} (Megatron)",
        )


def _placed(row: Row, found: RowRange, box: Box, first_row: int, name: str, model: ModelShape) -> Placed:
    start = found.fused - first_row
    target, local = list(box.spans), [Span(0, span.size) for span in box.spans]
    target[row.row_dim] = Span(found.start, found.start + found.size)
    local[row.row_dim] = Span(start, start + found.size)
    return Placed(name, model.dims(row.parts[found.part].dims), Box(tuple(target)), Box(tuple(local[row.row_dim :])))


def _full_name(row: Row, part: int, layer: int) -> str:
    name = row.parts[part].name
    return name if row.scope == "model" else f"model.layers.{layer}.{name}"


def home(tensor: str, model: ModelShape) -> Home:
    """The other direction: the Megatron parameter of a checkpoint tensor (canonical name), and its rows there.

    Raises:
        LayoutError: the model has no such tensor.
    """
    match = _LAYER_NAME.match(tensor)
    layer, inner = (-1, tensor) if match is None else (int(match["layer"]), match["rest"])
    for row in TABLE:
        names = [part.name for part in row.parts]
        if inner in names and (row.scope == "model") == (layer < 0) and row.exists(model, layer):
            part_rows = tuple(model.size(part.dims[row.row_dim]) for part in row.parts)
            everything = split_rows(part_rows, groups=model.size(row.groups), window=Span(0, sum(part_rows)))
            prefix = "" if layer < 0 else "decoder.layers."
            mine = tuple(found for found in everything if found.part == names.index(inner))
            return Home(prefix + row.keys[0], layer, mine)
    raise LayoutError(tensor, -1, f"a tensor of {model.architecture}", "a name that the naming table doesn't know")


def is_expert(tensor: str) -> bool:
    """Whether a logical tensor is a stack of experts, which expert parallelism cuts.

    >>> is_expert("model.layers.0.mlp.experts.up_proj.weight"), is_expert("model.layers.0.mlp.gate.weight")
    (True, False)
    """
    match = _LAYER_NAME.match(tensor)
    return match is not None and any(
        part.name == match["rest"] and row.row_dim == 1 for row in TABLE for part in row.parts
    )


def expected_tensors(model: ModelShape, *, dtype: str) -> Iterator[TensorSpec]:
    """Every logical tensor that the model has."""
    for row in TABLE:
        for layer in (-1,) if row.scope == "model" else range(model.layers):
            if row.exists(model, layer):
                for number, part in enumerate(row.parts):
                    yield TensorSpec(_full_name(row, number, layer), model.dims(part.dims), dtype)


def check_complete(manifest: Manifest, model: ModelShape) -> None:
    """Proves that the joined ranks hold something of every tensor that the model has.

    Raises:
        LayoutError: whole layers are missing (they are named), or single tensors are.
    """
    held = frozenset(spec.name for spec in manifest.tensors)
    matches = (_LAYER_NAME.match(name) for name in held)
    layers = frozenset(int(match["layer"]) for match in matches if match is not None)
    lost = [layer for layer in range(model.layers) if layer not in layers]
    if lost:
        raise LayoutError("", -1, f"layers 0 to {model.layers - 1}", f"no rank that holds layers {lost}")
    for spec in expected_tensors(model, dtype="float32"):
        if spec.name not in held:
            raise LayoutError(spec.name, -1, "a rank that holds it", "none")
