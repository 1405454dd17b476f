"""Cutting and packing lose, double and reorder nothing, and keep their limits."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.pour import Stacks, Stream, aligned, divide, pack
from refit_transport.testing.strategies import manifest_pairs

# Around the size below which nothing is cut, and far from it.
_WIDTHS = st.sampled_from((1, 3, 16, 500, 4096, 10_000))


@st.composite
def streams(draw):
    parts = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5), _WIDTHS), max_size=12))
    rows, first, row_bytes = np.array(parts, dtype=np.int64).reshape(-1, 3).T
    return Stream(np.arange(len(parts)), first, rows, row_bytes)


def slabs(stream):
    """Every slab by stack and number, in order."""
    columns = zip(stream.stack.tolist(), stream.first.tolist(), stream.rows.tolist(), strict=True)
    return [(stack, first + nth) for stack, first, rows in columns for nth in range(rows)]


@settings(deadline=None)
@given(streams(), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_shares_have_every_slab_once_in_order_and_end_near_their_part_of_the_bytes(stream, weights):
    parts = divide(stream, weights)
    assert len(parts) == len(weights)
    assert [slab for part in parts for slab in slabs(part)] == slabs(stream)
    total, slack = int(stream.nbytes.sum()), max(2 * 4096, int(stream.row_bytes.max(initial=0)))
    ends = np.cumsum([int(part.nbytes.sum()) for part in parts])
    wanted = total * np.cumsum(weights) / sum(weights)
    assert (abs(ends - wanted) <= slack).all()


@settings(deadline=None)
@given(streams(), st.sampled_from((1, 20, 600, 5000, 30_000)), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_payloads_have_every_slab_once_in_order_and_at_most_a_bucket(stream, bucket, weights):
    for part in divide(stream, weights):
        cuts = pack(part, bucket_bytes=bucket)
        fine = part.split(cuts)
        assert slabs(fine) == slabs(part)
        payload = np.searchsorted(cuts, fine.starts[:-1], side="right")
        padded = int(aligned(part.nbytes).sum())
        share = padded // max(1, -(-padded // bucket))
        filled = None
        for number in range(1, len(cuts) + 1):
            members = fine[payload == number]
            *before, last = members.nbytes.tolist()
            size = sum(map(aligned, before)) + last
            assert size <= bucket or members.rows.tolist() == [1]
            # Else the payload before would have taken this one's first slab.
            assert filled is None or filled + int(members.row_bytes[0]) > min(bucket, share)
            filled = aligned(size)


@settings(deadline=None)
@given(manifest_pairs(), st.integers(1, 64))
def test_slabs_of_all_stacks_are_the_atoms_in_row_major_order(pair, most):
    plan = plan_transfer(*pair)
    stacks = Stacks.of(plan, most_bytes=most)
    for atom in range(len(plan)):
        found = []
        for row in np.flatnonzero(stacks.atom == atom).tolist():
            dim, lo, hi = int(stacks.dim[row]), stacks.lo[row].tolist(), stacks.hi[row].tolist()
            elements = list(itertools.product(*itertools.starmap(range, zip(lo, hi, strict=True))))
            assert all(stop - start == 1 for start, stop in zip(lo[:dim], hi[:dim], strict=True))
            assert stacks.rows[row] == hi[dim] - lo[dim]
            width = plan.tensors[plan.tensor[atom]].wire_bytes
            assert stacks.rows[row] * stacks.row_bytes[row] == len(elements) * width
            assert stacks.row_bytes[row] <= max(most, width)
            found += elements
        lo, hi = plan.lo[atom].tolist(), plan.hi[atom].tolist()
        assert found == list(itertools.product(*itertools.starmap(range, zip(lo, hi, strict=True))))
