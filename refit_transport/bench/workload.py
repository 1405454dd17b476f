"""What a benchmark refits: tensors, and how each side cuts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest, Role
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: its shape in elements, and the dim that tensor parallelism cuts."""

    name: str
    shape: tuple[int, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of a refit, all in bfloat16."""

    weights: tuple[Weight, ...]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights) * DTYPE_BYTES[DTYPE]


@dataclass(frozen=True, slots=True)
class Side:
    """The parallel sizes of one side: `dp` replicas, each cut over `tp` consecutive ranks."""

    tp: int
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def manifest(self, role: Role, model: Model, *, first_rank: int) -> Manifest:
        """What each of the side's ranks holds of the model."""
        mesh = Mesh.of(first_rank=first_rank, dp=self.dp, tp=self.tp)
        layouts = {w.name: Layout(w.shape, mesh, (Replicate(), Shard(w.dim))) for w in model.weights}
        return manifest_from_layouts(role, layouts, dtype=DTYPE)


def transformer(*, layers: int, hidden: int) -> Model:
    """Four matrices per layer, cut by rows, columns, rows, columns: 24 * hidden ** 2 bytes.

    >>> transformer(layers=16, hidden=512).nbytes
    100663296
    """
    shapes = (
        ("self_attn.qkv_proj", (3 * hidden, hidden), 0),
        ("self_attn.o_proj", (hidden, hidden), 1),
        ("mlp.up_proj", (4 * hidden, hidden), 0),
        ("mlp.down_proj", (hidden, 4 * hidden), 1),
    )
    return Model(
        tuple(
            Weight(f"model.layers.{layer}.{name}.weight", shape, dim)
            for layer in range(layers)
            for name, shape, dim in shapes
        )
    )


def many(count: int, *, rows: int, columns: int) -> Model:
    """`count` equal small matrices, cut by rows.

    >>> many(3, rows=64, columns=32).nbytes
    12288
    """
    return Model(tuple(Weight(f"model.layers.{n}.norm.weight", (rows, columns), 0) for n in range(count)))
