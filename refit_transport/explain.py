"""Why each tensor of a planned refit goes the way it goes: from whom to whom, in which boxes, through which ranks.

`explain` reads a finished `RefitPlan` and decides nothing. Tensors that are cut alike over the same ranks (those of the
layers of one pipeline stage) are one `Group`, so that a model of full size stays readable.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import DTYPE_BYTES
from refit_transport.planning.plan import Ints, RankSet
from refit_transport.planning.routing import RESHARD
from refit_transport.refit_plan import RefitPlan
from refit_transport.transports.base import Leg

# How bytes come to a rank. copy: it holds them itself. local: from a holder in its own domain. enter: over the network
# from a holder, through this rank into its domain. forward: the same, but from a rank that received them before.
# inside: from the rank of its domain through which they came.
Arrival = Literal["copy", "local", "enter", "forward", "inside"]
ARRIVALS: tuple[Arrival, ...] = ("copy", "local", "enter", "forward", "inside")

# More runs of ranks than this, evenly spaced, are shown by the first two and the last.
_MOST_RUNS = 5
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Way:
    """What `sender` hands to `receiver`, as a share of all bytes of the boxes, 0 to 1. A `relay` doesn't want them."""

    arrival: Arrival
    sender: int
    receiver: int
    share: float
    relay: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Boxes of a tensor with the same holders and wanters, their bytes together, and how they come to the wanters.

    No ways: a native collective chooses them.
    """

    boxes: tuple[Box, ...]
    nbytes: int
    holders: RankSet
    wanters: RankSet
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one shape that go alike; `nbytes` are one tensor's. `transport` is "" where no target takes them.

    way: "messages" of the schedule, "native" (a collective of its own choice of ways), or "" where nothing moves.
    shard_to_shard: the share of the bytes that goes from shard to shard.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    transport: str
    way: Literal["messages", "native", ""]
    reason: str
    shard_to_shard: float
    parts: tuple[Part, ...] = field(repr=False)

    @property
    def family(self) -> str:
        """The names with their layers as ranges, such as "model.layers.{0-3}.mlp.up_proj.weight"."""
        return common_name(self.names)

    @property
    def sources(self) -> RankSet:
        """Ranks that hold some of it."""
        return _union(part.holders for part in self.parts)

    @property
    def targets(self) -> RankSet:
        """Ranks that want some of it."""
        return _union(part.wanters for part in self.parts)


def explain(plan: RefitPlan, names: Collection[str] | None = None) -> tuple[Group, ...]:
    """The groups of a plan's tensors, in the source's order; of those named when `names` is given.

    >>> from refit_transport.config.settings import RefitSettings
    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate, Shard
    >>> from refit_transport.scheduling.topology import Topology
    >>> from refit_transport.transports.base import Job
    >>> train = Layout((4, 8), Mesh.of(tp=1), (Shard(0),))
    >>> serve = Layout((4, 8), Mesh.of(first_rank=1, dp=2), (Replicate(),))
    >>> source = manifest_from_layouts("source", {"w": train}, dtype="float32")
    >>> target = manifest_from_layouts("target", {"w": serve}, dtype="float32")
    >>> job = Job(source, target, Topology.of([[0], [1], [2]]), RefitSettings(coverage="all"))
    >>> [group] = explain(RefitPlan(job))
    >>> for way in group.parts[0].ways:
    ...     print(way.arrival, way.sender, way.receiver, way.share)
    enter 0 1 1.0
    forward 1 2 1.0
    """
    specs = {spec.name: spec for spec in plan.job.source.tensors if names is None or spec.name in names}
    sets: dict[RankSet, int] = {}
    legs = [_Leg.of(leg, sets) for transport in plan.transports.values() for leg in transport.legs()]
    cuts: dict[str, list[_Cut]] = defaultdict(list)
    for leg in legs:
        for name, cut in leg.cuts():
            if name in specs:
                cuts[name].append(cut)
    native = {tensor.name for leg in legs if leg.leg.schedule is None for tensor in leg.leg.plan.tensors}
    routes = {route.tensor: route for route in plan.routes}
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, spec in specs.items():
        route = routes.get(name)
        how = () if route is None else (route.transport, route.reason, name in native, plan.tensor_bytes[name])
        key = tuple(part.tobytes() for cut in cuts[name] for part in (cut.lo, cut.hi, cut.holders, cut.wanters))
        alike[family(name), spec.shape, spec.dtype, how, key].append(name)
    number_of = {name: number for number, members in enumerate(alike.values()) for name in members}
    handed = _handed(legs, number_of)
    rank_sets = tuple(sets)
    groups = []
    for number, members in enumerate(alike.values()):
        first, route = members[0], routes.get(members[0])
        spec = specs[first]
        if route is None:
            nbytes, why = spec.box.numel * DTYPE_BYTES[spec.dtype], "no target rank takes it"
            groups.append(Group(tuple(members), spec.shape, spec.dtype, nbytes, "", "", why, 0.0, ()))
            continue
        nbytes = plan.tensor_bytes[first]
        width = nbytes // max(1, spec.box.numel)
        parts = _parts(cuts[first], width, len(members), handed[number], rank_sets)
        way: Literal["messages", "native"] = "native" if first in native else "messages"
        share = float(route.transport == RESHARD)
        groups.append(
            Group(
                tuple(members), spec.shape, spec.dtype, nbytes, route.transport, way, route.reason, share, tuple(parts)
            )
        )
    return tuple(groups)


def family(name: str) -> str:
    """The name without its layer's number.

    >>> family("model.layers.3.mlp.up_proj.weight")
    'model.layers.{}.mlp.up_proj.weight'
    """
    return _LAYER.sub("{}", name, count=1)


def common_name(names: Sequence[str]) -> str:
    """Names of one family as one, their layers as ranges.

    >>> common_name(["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"])
    'model.layers.{0-1}.mlp.up_proj.weight'
    >>> common_name(["lm_head.weight"])
    'lm_head.weight'
    """
    if len(names) == 1:
        return names[0]
    numbers = [int(found[0]) for name in names if (found := _LAYER.search(name))]
    return _LAYER.sub(f"{{{ranges(numbers)}}}", names[0], count=1)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people.

    >>> ranges([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10-11'
    >>> ranges([16, 48, 80, 112])
    '16, 48, 80, 112'
    >>> ranges(range(16, 512, 32))
    '16, 48, ..., 496'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    steps = {after[0] - before[0] for before, after in itertools.pairwise(runs)}
    if len(texts) > _MOST_RUNS and len(steps) == len({len(run) for run in runs}) == 1:
        texts = [*texts[:2], "...", texts[-1]]
    return ", ".join(texts)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Atoms of one tensor: their corners, and the numbers of their rank sets."""

    lo: Ints
    hi: Ints
    holders: Ints
    wanters: Ints


@dataclass(frozen=True, slots=True)
class _Leg:
    """A leg whose rank sets have numbers that are those of all legs."""

    leg: Leg
    holders: Ints
    wanters: Ints

    @classmethod
    def of(cls, leg: Leg, sets: dict[RankSet, int]) -> Self:
        numbers = np.array([sets.setdefault(ranks, len(sets)) for ranks in leg.plan.rank_sets], dtype=np.int64)
        return cls(leg, numbers[leg.plan.holders], numbers[leg.plan.wanters])

    def cuts(self) -> Iterator[tuple[str, _Cut]]:
        """Each tensor's atoms; a plan's atoms are ordered by tensor."""
        plan = self.leg.plan
        first = np.searchsorted(plan.tensor, np.arange(len(plan.tensors) + 1)).tolist()
        for index, tensor in enumerate(plan.tensors):
            rows, dims = slice(first[index], first[index + 1]), len(tensor.shape)
            yield tensor.name, _Cut(plan.lo[rows, :dims], plan.hi[rows, :dims], self.holders[rows], self.wanters[rows])


# The rank sets of a part: numbers of its holders and wanters.
_Ends = tuple[int, int]


def _handed(legs: Iterable[_Leg], number_of: Mapping[str, int]) -> dict[int, dict[_Ends, list[_Handed]]]:
    """What is handed from rank to rank of the parts of each group, all its tensors together."""
    found: dict[int, dict[_Ends, list[_Handed]]] = defaultdict(lambda: defaultdict(list))
    rows = [table for leg in legs if (table := _hand_table(leg, number_of)) is not None]
    if not rows:
        return found
    # Columns: group, holders, wanters, sender, receiver, arrival; and the bytes.
    keys, nbytes = np.concatenate([keys for keys, _ in rows]), np.concatenate([nbytes for _, nbytes in rows])
    for key, total in zip(*_summed(keys, nbytes), strict=True):
        group, holders, wanters, sender, receiver, arrival = key
        found[group][holders, wanters].append(_Handed(sender, receiver, arrival, total))
    return found


@dataclass(frozen=True, slots=True)
class _Handed:
    sender: int
    receiver: int
    arrival: int
    nbytes: int


def _hand_table(leg: _Leg, number_of: Mapping[str, int]) -> tuple[Ints, Ints] | None:
    """A row for each parcel of a chosen tensor and each hop of its payload, summed where the columns are equal."""
    schedule, plan = leg.leg.schedule, leg.leg.plan
    numbers = np.array([number_of.get(tensor.name, -1) for tensor in plan.tensors], dtype=np.int64)
    if schedule is None or not len(schedule.parcels):
        return None
    parcels, payloads, hops = schedule.parcels, schedule.payloads, schedule.hops
    rows = np.flatnonzero(numbers[parcels.tensor] >= 0)
    if not len(rows):
        return None
    payload = np.searchsorted(payloads.first_parcel, rows, side="right") - 1
    counts = payloads.first_hop[payload + 1] - payloads.first_hop[payload]
    row = np.repeat(rows, counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    hop = np.repeat(payloads.first_hop[payload], counts) + nth
    passed_on = hops.parent[hop] >= 0
    arrival = np.select(
        [hops.sender[hop] == hops.receiver[hop], hops.local[hop] & ~passed_on, ~passed_on, ~hops.local[hop]],
        [ARRIVALS.index("copy"), ARRIVALS.index("local"), ARRIVALS.index("enter"), ARRIVALS.index("forward")],
        ARRIVALS.index("inside"),
    )
    atom = parcels.atom[row]
    columns = (numbers[parcels.tensor[row]], leg.holders[atom], leg.wanters[atom], hops.sender[hop], hops.receiver[hop])
    keys, nbytes = _summed(np.stack((*columns, arrival), axis=1), parcels.nbytes()[row])
    return np.array(keys, dtype=np.int64), np.array(nbytes, dtype=np.int64)


def _summed(keys: Ints, nbytes: Ints) -> tuple[list[list[int]], list[int]]:
    """The distinct rows of `keys`, in order, and the sum of the bytes of each."""
    sizes = keys.max(axis=0) + 1
    flat = np.ravel_multi_index(tuple(keys.T), tuple(sizes.tolist()))
    distinct, inverse = np.unique(flat, return_inverse=True)
    totals = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(totals, inverse.reshape(-1), nbytes)
    return np.stack(np.unravel_index(distinct, tuple(sizes.tolist())), axis=1).tolist(), totals.tolist()


def _parts(
    cuts: Sequence[_Cut],
    width: int,
    tensors: int,
    handed: Mapping[_Ends, Sequence[_Handed]],
    rank_sets: Sequence[RankSet],
) -> Iterator[Part]:
    """A tensor's boxes by their ends; `tensors` have the bytes of `handed`; `width` is bytes per element."""
    boxes: dict[_Ends, list[Box]] = defaultdict(list)
    for cut in cuts:
        ends = zip(cut.holders.tolist(), cut.wanters.tolist(), strict=True)
        for end, lo, hi in zip(ends, cut.lo.tolist(), cut.hi.tolist(), strict=True):
            boxes[end].append(Box.of(*zip(lo, hi, strict=True)))
    for (holders, wanters), found in boxes.items():
        nbytes = width * sum(box.numel for box in found)
        wants = frozenset(rank_sets[wanters])
        ways = (
            Way(ARRIVALS[x.arrival], x.sender, x.receiver, x.nbytes / (nbytes * tensors), x.receiver not in wants)
            for x in handed.get((holders, wanters), ())
        )
        ordered = sorted(ways, key=lambda way: (ARRIVALS.index(way.arrival), way.sender, way.receiver))
        yield Part(tuple(found), nbytes, rank_sets[holders], rank_sets[wanters], tuple(ordered))


def _union(sets: Iterable[RankSet]) -> RankSet:
    return tuple(sorted(set().union(*sets)))
