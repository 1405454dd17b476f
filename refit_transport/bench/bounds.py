"""The lower bound of a case's time: what must cross the busiest node's NICs at the rate of their payload."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from refit_transport.bench.cases import Case
from refit_transport.bench.lab import Wiring
from refit_transport.bench.variants import Variant
from refit_transport.bench.workload import DTYPE, Model
from refit_transport.layout.box import Box, Span
from refit_transport.layout.manifest import DTYPE_BYTES, Manifest

Nodes = frozenset[int]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds, 0 where no rate is limited, and the NICs that need them."""

    seconds: float
    binds: str


def lower_bound(case: Case, variant: Variant) -> LowerBound:
    """No schedule is faster: a node takes in, once, what it needs and doesn't hold; a byte leaves the sources once.

    Which holder sends a byte is free. The best assignment of bytes to holder nodes loads some set of nodes to the
    largest of: the bytes that only nodes of this set hold, over the sum of their rates.
    """
    wiring = case.wiring
    if wiring.mbit is None:
        return LowerBound(0.0, "nothing")
    moved = _moved(case, variant)
    found = [LowerBound(0.0, "nothing")]
    for node in range(len(wiring.nodes)):
        entering = sum(nbytes for (_, wanters), nbytes in moved.items() if node in wanters)
        found.append(LowerBound(entering / _rate(wiring, (node,)), f"into node {node}"))
    holding = sorted({node for holders, _ in moved for node in holders})
    for count in range(1, len(holding) + 1):
        for nodes in itertools.combinations(holding, count):
            leaving = sum(nbytes for (holders, _), nbytes in moved.items() if holders <= set(nodes))
            found.append(LowerBound(leaving / _rate(wiring, nodes), f"out of nodes {list(nodes)}"))
    return max(found, key=lambda bound: bound.seconds)


def _rate(wiring: Wiring, nodes: Sequence[int]) -> float:
    return sum(rate for node in nodes if (rate := wiring.bytes_per_second(node)) is not None)


def _moved(case: Case, variant: Variant) -> Mapping[tuple[Nodes, Nodes], int]:
    """Bytes by (nodes that hold them, nodes that need them and don't hold them), where such nodes are."""
    moved: dict[tuple[Nodes, Nodes], int] = defaultdict(int)
    weights = case.model_of(variant).weights
    alike = Counter((weight.shape, weight.dim) for weight in weights)
    for weight in {(weight.shape, weight.dim): weight for weight in weights}.values():
        model = Model((weight,))
        holders = _boxes(case.source.manifest("source", model, first_rank=0), case.wiring)
        wanters = _boxes(case.target.manifest("target", model, first_rank=case.source.ranks), case.wiring)
        for cell in _cells([box for _, box in (*holders, *wanters)]):
            have = frozenset(node for node, box in holders if box.contains(cell))
            need = frozenset(node for node, box in wanters if box.contains(cell)) - have
            if need:
                moved[have, need] += cell.numel * DTYPE_BYTES[DTYPE] * alike[weight.shape, weight.dim]
    return moved


def _boxes(side: Manifest, wiring: Wiring) -> list[tuple[int, Box]]:
    return [(wiring.node_of(ranked.rank), piece.box) for ranked in side.ranks for piece in ranked.pieces]


def _cells(boxes: Sequence[Box]) -> Iterator[Box]:
    """The grid that the boxes' faces make; no cell lies partly in a box."""
    spans = []
    for dim in range(len(boxes[0].spans)):
        cuts = sorted({edge for box in boxes for edge in (box.spans[dim].start, box.spans[dim].stop)})
        spans.append([Span(start, stop) for start, stop in itertools.pairwise(cuts)])
    return (Box(cell) for cell in itertools.product(*spans))
