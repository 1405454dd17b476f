"""Holdings, counted element by element from every piece."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.layout.box import Box
from refit_transport.layout.layout import manifest_from_layouts
from refit_transport.layout.manifest import Manifest, Piece, PieceColumns, RankManifest, TensorSpec
from refit_transport.planning.holdings import HoldingIndex
from refit_transport.testing.strategies import layouts, meshes


@st.composite
def sides(draw):
    """Manifests over one mesh, with equal layouts among them; some ranks as columns, some replicas, some pieces cut."""
    mesh = draw(meshes())
    kinds = [draw(layouts(shape, mesh)) for shape in draw(st.lists(st.sampled_from([(), (7,), (4, 6)]), min_size=1))]
    held = {f"w{number}": draw(st.sampled_from(kinds)) for number in range(draw(st.integers(1, 6)))}
    side = manifest_from_layouts("source", held, dtype="uint8")
    ranks = []
    for ranked in side.ranks:
        pieces = [part for piece in ranked.pieces for part in (_halves(piece) if draw(st.booleans()) else [piece])]
        pieces = draw(st.permutations(pieces))
        dropped = draw(st.sets(st.sampled_from(sorted(held)), max_size=1))
        pieces = tuple(piece for piece in pieces if piece.tensor not in dropped)
        ranks.append(
            RankManifest(
                ranked.rank, "source", ranked.tensors, draw(st.sampled_from((pieces, PieceColumns.of(pieces))))
            )
        )
    ranks += [ranks[0].replica(100 + number) for number in range(draw(st.integers(0, 2)))]
    return Manifest.of(ranks)


def _halves(piece):
    if not piece.box.spans:
        return [piece]
    first, *others = ((span.start, span.stop) for span in piece.box.spans)
    middle = (first[0] + first[1]) // 2
    skipped = (middle - first[0]) * piece.strides[0]
    return [
        Piece(piece.tensor, Box.of((first[0], middle), *others), piece.buffer, piece.offset, piece.strides),
        Piece(piece.tensor, Box.of((middle, first[1]), *others), piece.buffer, piece.offset + skipped, piece.strides),
    ]


def _owners(shape, boxes):
    """For each element the ranks that have it, as a set in an object array."""
    found = np.empty(shape, dtype=object)
    for place in np.ndindex(shape):
        found[place] = frozenset(
            rank
            for corners, ranks in boxes
            if all(start <= i < stop for i, (start, stop) in zip(place, corners, strict=True))
            for rank in ranks
        )
    return found


@settings(deadline=None)
@given(sides(), st.data())
def test_holdings_say_which_rank_has_which_element(side, data):
    names = data.draw(st.none() | st.sets(st.sampled_from([spec.name for spec in side.tensors])))
    index = HoldingIndex.of(side, names)
    for spec in side.tensors:
        holding = index.of_tensor(spec.name)
        pieces = [
            (tuple((span.start, span.stop) for span in piece.box.spans), (ranked.rank,))
            for ranked in side.ranks
            for piece in ranked.pieces
            if piece.tensor == spec.name and (names is None or spec.name in names)
        ]
        held = list(zip(holding.boxes, holding.ranks, strict=True))
        assert (_owners(spec.shape, held) == _owners(spec.shape, pieces)).all()
        assert list(holding.boxes) == sorted(holding.boxes)


@given(sides())
def test_equal_holdings_are_one_object(side):
    found = HoldingIndex.of(side).by_tensor.values()
    assert len({id(holding) for holding in found}) == len(set(found))


def test_tensors_that_all_ranks_cut_alike_share_their_holding_however_many_there_are():
    spec = [TensorSpec(f"w{number}", (8, 2), "uint8") for number in range(50)]
    ranks = [
        RankManifest(
            rank,
            "source",
            tuple(spec),
            tuple(Piece(s.name, Box.of((4 * rank, 4 * rank + 4), (0, 2)), s.name, 0, (2, 1)) for s in spec),
        )
        for rank in (0, 1)
    ]
    holdings = HoldingIndex.of(Manifest.of(ranks)).by_tensor
    (one,) = {id(holding): holding for holding in holdings.values()}.values()
    assert (len(holdings), one.ranks) == (50, ((0,), (1,)))
