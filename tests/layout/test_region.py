"""Merged boxes against a dense mask: the same elements, disjoint, and the same boxes however the region was cut."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.layout.region import merge_boxes

SIZES = (24, 9, 6, 4)


def mask(boxes):
    """How many boxes hold each element."""
    dims = boxes.shape[1]
    held = np.zeros(SIZES[dims - 1 : dims] * dims, dtype=np.int64)
    for box in boxes:
        held[tuple(slice(start, stop) for start, stop in box)] += 1
    return held


@st.composite
def box_sets(draw):
    """Boxes of 1 to 4 dims: empty, equal, overlapping and touching ones included."""
    dims = draw(st.integers(1, 4))
    ends = st.tuples(*[st.integers(0, SIZES[dims - 1])] * 2).map(sorted)
    boxes = draw(st.lists(st.lists(ends, min_size=dims, max_size=dims), max_size=8))
    return np.array(boxes, dtype=np.int64).reshape(-1, dims, 2)


@given(box_sets())
def test_merged_boxes_hold_the_same_elements_once(boxes):
    merged = merge_boxes(boxes)
    assert np.array_equal(mask(merged), mask(boxes) > 0)
    assert sorted(merged.tolist()) == merged.tolist()


@given(box_sets(), st.randoms(use_true_random=False))
def test_equal_regions_have_equal_boxes_however_they_were_cut(boxes, random):
    elements = [[[i, i + 1] for i in index] for index in np.argwhere(mask(boxes))]
    random.shuffle(elements)
    recut = np.array(elements, dtype=np.int64).reshape(-1, boxes.shape[1], 2)
    assert np.array_equal(merge_boxes(recut), merge_boxes(boxes))


@given(box_sets())
def test_merging_again_changes_nothing(boxes):
    once = merge_boxes(boxes)
    assert np.array_equal(merge_boxes(once), once)


def test_a_box_cut_into_a_grid_is_one_box_again():
    spans = [[(i, i + 3) for i in range(0, 12, 3)]] * 3
    grid = np.array(list(itertools.product(*spans)))[::-1]
    assert merge_boxes(grid).tolist() == [[[0, 12]] * 3]


def test_bars_of_different_heights_stay_bars_whichever_dim_they_stand_on():
    bars = np.array([[[0, height], [column, column + 1]] for column, height in enumerate((3, 5, 2, 7))])
    assert merge_boxes(bars).tolist() == sorted(bars.tolist())
    lying = bars[:, ::-1]
    assert merge_boxes(lying).tolist() == sorted(lying.tolist())


def test_sizes_past_2_to_the_32():
    edge = 1 << 33
    halves = np.array([[[edge, 2 * edge], [0, 7]], [[0, edge], [0, 7]]])
    assert merge_boxes(halves).tolist() == [[[0, 2 * edge], [0, 7]]]


def test_without_elements_nothing_is_left():
    assert merge_boxes(np.zeros((0, 3, 2), dtype=np.int64)).shape == (0, 3, 2)
    assert merge_boxes(np.array([[[0, 3], [2, 2]]])).shape == (0, 2, 2)


@pytest.mark.parametrize("boxes_per_call", [16, 256, 100_000])
def test_a_hundred_thousand_boxes_take_well_under_a_second(boxes_per_call):
    experts = np.zeros((boxes_per_call, 3, 2), dtype=np.int64)
    experts[:, 0] = np.arange(boxes_per_call)[::-1, None] + (0, 1)
    experts[:, 1:, 1] = 64
    began = time.process_time()
    for _ in range(100_000 // boxes_per_call):
        assert len(merge_boxes(experts)) == 1
    assert time.process_time() - began < 2
