"""Which tensors a native collective can move whole: NCCL M2N's limits as data, and layouts as it takes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from refit_transport.layout.manifest import Manifest, Piece, TensorSpec
from refit_transport.planning.holdings import Corners, Holding, HoldingIndex


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """What a native collective can move.

    dims: of a tensor, at most. dtypes: of the elements. source_shards: that may meet one target shard, at most.
    target_shards: that may meet one source shard, at most.
    """

    dims: int
    dtypes: frozenset[str]
    source_shards: int
    target_shards: int


# Those of nccl-extensions 0.2: its header's and its release notes'.
M2N_LIMITS = NativeLimits(
    dims=3,
    dtypes=frozenset(
        ("float64", "int64", "float32", "int32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
    ),
    source_shards=16,
    target_shards=64,
)


@dataclass(frozen=True, slots=True)
class NativeSide:
    """One side's layout of a tensor: a mesh of two axes over ranks in a row, of which one may cut one dim evenly.

    `cuts` says for each axis which dim of the tensor it cuts, None where it replicates. `local_shape` is every rank's.
    """

    first_rank: int
    mesh: tuple[int, int]
    cuts: tuple[int | None, int | None]
    local_shape: tuple[int, ...]

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.mesh[0] * self.mesh[1])

    @property
    def spans(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The dim that is cut (0 where none is), and the interval of it that each shard holds."""
        axis = 0 if self.cuts[0] is not None else 1
        dim = self.cuts[axis] or 0
        size = self.local_shape[dim]
        return dim, tuple((index * size, (index + 1) * size) for index in range(self.mesh[axis]))


@dataclass(frozen=True, slots=True)
class NativeTensor:
    """A tensor that a native collective moves whole, from one layout to the other."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: NativeSide
    target: NativeSide


@dataclass(frozen=True, slots=True)
class NativeSplit:
    """Tensors that a native collective moves, in the target's order, and why each other one goes by the schedule."""

    tensors: tuple[NativeTensor, ...] = ()
    why_not: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, source: Manifest, target: Manifest, names: Collection[str], *, limits: NativeLimits = M2N_LIMITS
    ) -> Self:
        """Looks at every named tensor that the target has; pure, equal on every rank.

        Rows over ranks 0 and 1 to columns over ranks 2 to 5, each column twice; and a tensor of four dims:

        >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
        >>> from refit_transport.layout.mesh import Mesh
        >>> from refit_transport.layout.placement import Replicate, Shard
        >>> train, serve = Mesh.of(tp=2), Mesh.of(first_rank=2, dp=2, tp=2)
        >>> held = {"w": Layout((8, 4), train, (Shard(0),)), "x": Layout((2, 2, 2, 2), train, (Shard(0),))}
        >>> wanted = {name: Layout(x.shape, serve, (Replicate(), Shard(1))) for name, x in held.items()}
        >>> sides = (manifest_from_layouts("source", held, dtype="float32"),
        ...          manifest_from_layouts("target", wanted, dtype="float32"))
        >>> split = NativeSplit.of(*sides, ("w", "x"))
        >>> split.tensors[0].target
        NativeSide(first_rank=2, mesh=(2, 2), cuts=(None, 1), local_shape=(8, 2))
        >>> split.why_not
        {'x': ('it has 4 dims, NCCL M2N moves tensors of 1 to 3',)}
        """
        names = set(names)
        here, there = _Side.of("source", source, names), _Side.of("target", target, names)
        have = {spec.name: spec for spec in source.tensors}
        tensors, why_not = [], {}
        for spec in target.tensors:
            if spec.name in names:
                found = _native(have[spec.name], spec, here, there, limits)
                if isinstance(found, NativeTensor):
                    tensors.append(found)
                else:
                    why_not[spec.name] = found
        return cls(tuple(tensors), why_not)


def _native(
    held: TensorSpec, wanted: TensorSpec, source: _Side, target: _Side, limits: NativeLimits
) -> NativeTensor | tuple[str, ...]:
    reasons = list(_of_the_tensor(held, wanted, limits))
    here, there = source.layout(wanted), target.layout(wanted)
    for side, found in ((source, here), (target, there)):
        reasons += () if isinstance(found, NativeSide) else found
        reasons += side.memory.get(wanted.name, ())
    if isinstance(here, NativeSide) and isinstance(there, NativeSide):
        reasons += _of_the_pair(here, there, limits)
        if not reasons:
            return NativeTensor(wanted.name, wanted.shape, wanted.dtype, here, there)
    return tuple(reasons)


def _of_the_tensor(held: TensorSpec, wanted: TensorSpec, limits: NativeLimits) -> Iterable[str]:
    if not 1 <= len(wanted.shape) <= limits.dims:
        yield f"it has {len(wanted.shape)} dims, NCCL M2N moves tensors of 1 to {limits.dims}"
    if held.dtype != wanted.dtype:
        yield f"it is {held.dtype} on the source and {wanted.dtype} on the target, NCCL M2N doesn't convert"
    elif wanted.dtype not in limits.dtypes:
        yield f"NCCL M2N doesn't move {wanted.dtype}"
    if 0 in wanted.shape:
        yield "it has no elements"


def _of_the_pair(source: NativeSide, target: NativeSide, limits: NativeLimits) -> Iterable[str]:
    if set(source.ranks) & set(target.ranks):
        yield "source and target share ranks, NCCL M2N takes two separate groups"
    (dim, have), (other, want) = source.spans, target.spans
    # Shards of different dims all meet each other.
    meet = [[dim != other or (a < d and c < b) for c, d in want] for a, b in have]
    feeding, fed = max(map(sum, zip(*meet, strict=True))), max(map(sum, meet))
    if feeding > limits.source_shards:
        yield f"{feeding} source shards meet in one target shard, NCCL M2N takes {limits.source_shards}"
    if fed > limits.target_shards:
        yield f"one source shard goes to {fed} target shards, NCCL M2N takes {limits.target_shards}"


@dataclass(frozen=True, slots=True)
class _Side:
    """A side's holdings, and what is wrong with the memory of a tensor, if anything is."""

    role: str
    holdings: HoldingIndex
    memory: Mapping[str, tuple[str, ...]]
    known: dict[tuple[Holding, tuple[int, ...]], NativeSide | tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, role: str, manifest: Manifest, names: Collection[str]) -> Self:
        wrong: dict[str, tuple[str, ...]] = {}
        # Replicas share one tuple of pieces.
        for ranked in {id(ranked.pieces): ranked for ranked in manifest.ranks}.values():
            pieces: dict[str, list[Piece]] = {}
            for piece in ranked.pieces:
                if piece.tensor in names and piece.box.numel:
                    pieces.setdefault(piece.tensor, []).append(piece)
            for tensor, members in pieces.items():
                if len(members) > 1 or not _is_dense(members[0]):
                    wrong.setdefault(
                        tensor, (f"{role} rank {ranked.rank} doesn't hold it as one dense block of memory",)
                    )
        return cls(role, HoldingIndex.of(manifest, names), wrong)

    def layout(self, spec: TensorSpec) -> NativeSide | tuple[str, ...]:
        """The layout as a native collective takes it, or what is in the way."""
        key = self.holdings.of_tensor(spec.name), spec.shape
        if key not in self.known:
            found = _layout(*key)
            self.known[key] = found if isinstance(found, NativeSide) else (f"the {self.role} {found}",)
        return self.known[key]


def _is_dense(piece: Piece) -> bool:
    step = 1
    for span, stride in zip(reversed(piece.box.spans), reversed(piece.strides), strict=True):
        if span.size > 1 and stride != step:
            return False
        step *= span.size
    return True


def _layout(holding: Holding, shape: tuple[int, ...]) -> NativeSide | str:
    """The layout, or what about it a mesh of one cutting axis can't say."""
    owner = {rank: index for index, ranks in enumerate(holding.ranks) for rank in ranks}
    shards, ranks = len(holding.boxes), len(owner)
    if not ranks or not shape:
        return "holds nothing of it" if not ranks else "has no dim to cut"
    if sum(map(len, holding.ranks)) != ranks:
        return "has ranks that hold several boxes of it"
    first = min(owner)
    if set(owner) != set(range(first, first + ranks)):
        return "has ranks that are not numbered in a row"
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in holding.boxes)]
    if len(dims) > 1:
        return f"is cut along dims {' and '.join(map(str, dims))}, NCCL M2N takes one sharded axis"
    dim = dims[0] if dims else 0
    if not _is_even(holding.boxes, dim, shape[dim]):
        return f"doesn't cut dim {dim} into equal parts that make up the whole"
    copies = ranks // shards
    local = tuple(stop - start for start, stop in holding.boxes[0])
    order = [owner[rank] for rank in range(first, first + ranks)]
    if shards == 1:
        # A side of whole copies is cut into one part, by an axis of one rank: two replicating axes are not allowed.
        return NativeSide(first, (ranks, 1), (None, 0), local)
    if order == [index // copies for index in range(ranks)]:
        return NativeSide(first, (shards, copies), (dim, None), local)
    if order == [index % shards for index in range(ranks)]:
        return NativeSide(first, (copies, shards), (None, dim), local)
    return "has ranks that are not in the order of a mesh"


def _is_even(boxes: tuple[Corners, ...], dim: int, size: int) -> bool:
    """Whether boxes that differ in one dim, in order, cut it evenly and wholly."""
    part, rest = divmod(size, len(boxes))
    return not rest and all(box[dim] == (index * part, (index + 1) * part) for index, box in enumerate(boxes))
