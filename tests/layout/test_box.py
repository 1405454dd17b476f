"""Boxes without other boxes, element by element."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from refit_transport.layout.box import Box


@st.composite
def boxes(draw, dims):
    ends = [sorted((draw(st.integers(0, 5)), draw(st.integers(0, 5)))) for _ in range(dims)]
    return Box.of(*map(tuple, ends))


def elements(box):
    return list(itertools.product(*(range(span.start, span.stop) for span in box.spans)))


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_what_is_left_has_every_other_element_once(pair):
    box, other = pair
    left = [element for rest in box.minus(other) for element in elements(rest)]
    assert sorted(left) == sorted(set(elements(box)) - set(elements(other)))
