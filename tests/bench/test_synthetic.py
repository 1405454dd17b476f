"""Made-up weights: the same whichever box is asked for, other ones at every other place and version."""

from __future__ import annotations

import itertools

import pytest
import torch

from refit_transport.bench import synthetic
from refit_transport.bench.synthetic import box_values, fill_box, is_version
from refit_transport.layout.box import Box

SHAPES = [(), (7,), (5, 600), (3, 4, 5), (2, 3, 2, 3, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_what_is_filled_is_found_and_exact(shape, dtype):
    box = Box.full(shape)
    view = torch.zeros(shape, dtype=getattr(torch, dtype))
    fill_box(view, "w", box, version=3)
    assert torch.equal(view.to(torch.int16), box_values("w", box, version=3))
    assert is_version(view, "w", box, version=3)
    assert not any(is_version(view, "w", box, version=other) for other in (0, 2, 4, 250))
    assert not is_version(view, "v", box, version=3)


def test_values_are_below_251_and_of_all_kinds():
    values = box_values("w", Box.full((300, 300)), version=9)
    assert (int(values.min()), int(values.max())) == (0, 250)
    assert len(values.unique()) == 251


def test_any_one_wrong_element_shows_in_any_slice(monkeypatch):
    monkeypatch.setattr(synthetic, "_LARGEST", 8)
    box = Box.of((10, 17), (100, 106))
    view = torch.empty(7, 6)
    fill_box(view, "w", box, version=1)
    assert torch.equal(view, box_values("w", Box.of((0, 20), (0, 200)), version=1)[10:17, 100:106].float())
    for row, column in itertools.product(range(7), range(6)):
        wrong = view.clone()
        wrong[row, column] += 1
        assert not is_version(wrong, "w", box, version=1)


@pytest.mark.parametrize("moved", [(1, 0), (0, 1), (64, 0), (0, 251), (256, 256)])
def test_a_box_of_another_place_is_told_apart(moved):
    rows, columns = moved
    here = box_values("w", Box.of((0, 8), (0, 8)), version=1)
    there = box_values("w", Box.of((rows, rows + 8), (columns, columns + 8)), version=1)
    assert not torch.equal(here, there)
    assert not torch.equal(here, here.T)


def test_places_beyond_32_bits():
    far = 1 << 40
    values = box_values("w", Box.of((far, far + 600)), version=0)
    assert len(values.unique()) > 200
    assert torch.equal(values[100:], box_values("w", Box.of((far + 100, far + 600)), version=0))
