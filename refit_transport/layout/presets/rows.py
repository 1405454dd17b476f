"""One row per kind of tensor: its name, true shape, what it is for, and how each side divides it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from refit_transport.layout.canonical import has_fields_in_turn
from refit_transport.layout.presets.cuts import WHOLE, Block, Cut, Even

Group = Literal[
    "ffn",
    "expert_ffn",
    "shared_expert",
    "attention",
    "mamba",
    "embedding",
    "lm_head",
    "norm",
    "router",
    "mtp",
    "other",
]


Spec = Literal["transformer_engine", "local"]
"""Whose layers Megatron builds a model of: TransformerEngine's, or its own, which need no GPU."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a checkpoint packs in one tensor: `dim` is `units` equal units, each of them these fields, in order.

    Mamba's `in_proj` is one unit z | x | B | C | dt; a gated `q_proj` is a unit q | gate for each head.
    """

    dim: int
    fields: tuple[int, ...]
    units: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of tensor inside a layer, or one outside of the layers.

    `name` follows the layer's prefix; `shape` is in elements. `trained` says how Megatron's tensor-parallel ranks
    divide it, `served` how vLLM's do, `trained_locally` how Megatron's own layers do where that isn't `trained`. With
    `experts` dim 0 counts experts: expert parallelism divides it, and the expert-tensor ranks divide the rest. "mamba"
    also holds Gated DeltaNet. `packing` says what is packed in it. With `inputs_first` a linear layer's inputs come
    before its outputs, not the other way round. Where fields are `in_turn`, the last dim counts them. A norm that is
    `zero_centered` scales by 1 more than it stores.
    """

    name: str
    shape: tuple[int, ...]
    group: Group
    trained: Cut = WHOLE
    served: Cut = WHOLE
    experts: bool = False
    packing: Packing | None = None
    inputs_first: bool = False
    zero_centered: bool = False
    trained_locally: Cut | None = None

    def trained_by(self, spec: Spec) -> Cut:
        """How tensor-parallel ranks divide it that build layers of this spec."""
        return self.trained_locally if spec == "local" and self.trained_locally is not None else self.trained

    @property
    def in_turn(self) -> bool:
        """See `layout.canonical`."""
        return has_fields_in_turn(self.name, self.shape)

    def named(self, prefix: str) -> Row:
        """The same under a longer name."""
        return replace(self, name=prefix + self.name)


Rows = tuple[Row, ...]


def under(prefix: str, *rows: Row) -> Rows:
    """The rows with a common prefix."""
    return tuple(row.named(prefix) for row in rows)


def whole(name: str, shape: tuple[int, ...], group: Group) -> Row:
    """A tensor that every rank has."""
    return Row(name, shape, group)


def norm(name: str, size: int) -> Row:
    """The scale of a normalisation that every rank has."""
    return Row(f"{name}.weight", (size,), "norm")


def zero_centered(*rows: Row) -> Rows:
    """The same rows; their norms scale by 1 more than they store."""
    return tuple(replace(row, zero_centered=True) if row.group == "norm" else row for row in rows)


def divided(name: str, shape: tuple[int, ...], group: Group, *blocks: Block, dim: int = 0) -> Row:
    """A tensor that both sides divide alike: `dim` in these blocks, which are packed, or evenly where there is one."""
    cut = Even(dim, blocks)
    packing = Packing(dim, tuple(block.size for block in blocks)) if len(blocks) > 1 else None
    return Row(name, shape, group, cut, cut, packing=packing)


def width(size: int, of: str) -> Block:
    """A dim that can be cut anywhere."""
    return Block(size, size, of)


def column(name: str, block: Block, inner: int, group: Group, *, fields: tuple[int, ...] = ()) -> Row:
    """A linear layer [block, inner] whose outputs are divided; each of the block's units packs these fields."""
    row = divided(f"{name}.weight", (block.size, inner), group, block)
    return replace(row, packing=Packing(0, fields, block.units)) if fields else row


def row(name: str, outer: int, block: Block, group: Group) -> Row:
    """A linear layer [outer, block] whose inputs are divided."""
    return divided(f"{name}.weight", (outer, block.size), group, block, dim=1)


def latent(name: str, outer: int, inner: int, group: Group) -> Row:
    """A linear layer that every rank has; Megatron's own divides its outputs, and gathers them."""
    return replace(replicated(name, outer, inner, group), trained_locally=Even(0, (width(outer, "latent width"),)))


def replicated(name: str, outer: int, inner: int, group: Group) -> Row:
    """A linear layer that every rank has."""
    return whole(f"{name}.weight", (outer, inner), group)
