"""The transfer plan: which boxes the targets need and who can send them. No choice, order or time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest
from refit_transport.layout.wire import digest
from refit_transport.planning.proof import prove

Ints = npt.NDArray[np.int64]
RankSet = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the plan. The wire carries the narrower of the two sides' dtypes; of equal widths, the target's."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    target_dtype: str

    @property
    def wire_dtype(self) -> str:
        narrower = DTYPE_BYTES[self.source_dtype] < DTYPE_BYTES[self.target_dtype]
        return self.source_dtype if narrower else self.target_dtype

    @property
    def wire_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return DTYPE_BYTES[self.wire_dtype]


@dataclass(frozen=True, slots=True)
class Boxed:
    """Boxes of tensors, a row per box.

    Columns: `tensor` (index in `tensors`), `lo` and `hi` (shape [n, most dims], padded with 0, 1).
    """

    tensors: tuple[PlannedTensor, ...]
    tensor: Ints
    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> Box:
        """The box in its tensor's own dims."""
        dims = len(self.tensors[self.tensor[row]].shape)
        return Box.of(*zip(self.lo[row, :dims].tolist(), self.hi[row, :dims].tolist(), strict=True))

    def name(self, row: int) -> str:
        """The canonical name of the box's tensor."""
        tensor: PlannedTensor = self.tensors[self.tensor[row]]
        return tensor.name

    def elements(self) -> Ints:
        """The elements of each box, shape [n]."""
        result: Ints = np.prod(self.hi - self.lo, axis=1, dtype=np.int64)
        return result

    def nbytes(self) -> Ints:
        """The bytes of each box on the wire, shape [n]."""
        width = np.array([tensor.wire_bytes for tensor in self.tensors], dtype=np.int64)
        return self.elements() * width[self.tensor] if len(self) else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TransferPlan(Boxed):
    """Disjoint boxes ("atoms"), ordered by tensor, each wholly held by its holders and wholly wanted by its wanters.

    `holders` and `wanters` are indices in `rank_sets`, which lists distinct ascending tuples of ranks. A model has many
    atoms but few rank sets.
    """

    rank_sets: tuple[RankSet, ...]
    holders: Ints
    wanters: Ints

    def digest(self) -> str:
        """Equal on every rank that computed the same plan."""
        columns = (self.tensor, self.lo, self.hi, self.holders, self.wanters)
        return digest(
            repr(self.tensors), repr(self.rank_sets), *(np.ascontiguousarray(column).tobytes() for column in columns)
        )

    def check(self, source: Manifest, target: Manifest) -> None:
        """Proves that each wanted element is delivered exactly once, and only from ranks that hold it.

        Raises:
            PlanError: a hole, a doubled element, or a holder or wanter whose pieces don't contain the atom.
        """
        prove(self, source, target)
