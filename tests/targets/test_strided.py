"""`locate` against torch: whatever view of a matrix is copied, the located box and strides move the same elements."""

import random

import pytest
import torch

from refit_transport.layout.layout import row_major_strides
from refit_transport.targets.strided import StridedView, locate


def _random_view(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    view = tensor
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(["narrow", "transpose", "unsqueeze", "squeeze", "split", "join", "select"])
        if kind == "narrow" and view.dim():
            dim = rng.randrange(view.dim())
            start = rng.randint(0, view.shape[dim])
            view = view.narrow(dim, start, rng.randint(0, view.shape[dim] - start))
        elif kind == "transpose" and view.dim() > 1:
            view = view.transpose(*rng.sample(range(view.dim()), 2))
        elif kind == "unsqueeze":
            view = view.unsqueeze(rng.randint(0, view.dim()))
        elif kind == "squeeze":
            view = view.squeeze()
        elif kind == "select" and view.dim() and view.shape[0]:
            view = view[rng.randrange(view.shape[0])]
        elif kind == "split" and view.dim() and view.shape[-1] % 2 == 0:
            view = view.unflatten(-1, (2, -1)) if view.shape[-1] else view
        elif kind == "join" and view.dim() > 1 and view.is_contiguous():
            view = view.flatten(0, 1)
    return view


def _is_affine_box(source: torch.Tensor, view: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the view's elements fill a box, and a copy of the view lies at strides along the box's dims."""
    inside = torch.isin(source, view.reshape(-1))
    corners = [(int(index.min()), int(index.max()) + 1) for index in inside.nonzero(as_tuple=True)]
    box = source[tuple(slice(*corner) for corner in corners)]
    if box.numel() != view.numel():
        return False
    places = torch.empty(source.numel() + 1, dtype=torch.long)
    offsets = torch.arange(copy.numel())
    places[copy.as_strided((copy.numel(),), (1,))] = offsets
    offsets = places[box]
    first = offsets.reshape(-1)[0]
    affine = first.expand(offsets.shape).clone()
    for dim in range(offsets.dim()):
        line = offsets.movedim(dim, 0).reshape(offsets.shape[dim], -1)[:, 0] - first
        step = line[1] if len(line) > 1 else 0
        affine += (torch.arange(len(line)) * step).reshape([-1 if d == dim else 1 for d in range(offsets.dim())])
    return torch.equal(affine, offsets)


@pytest.mark.parametrize("seed", range(300))
def test_a_located_box_moves_the_same_elements_as_the_view(seed):
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(0, 4)))
    source = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    view = _random_view(rng, source)
    order = rng.sample(range(view.dim()), view.dim())
    wanted = torch.zeros([view.shape[dim] for dim in order], dtype=torch.long).permute(
        [order.index(dim) for dim in range(view.dim())]
    )
    wanted.copy_(view)
    located = locate(
        StridedView(view.storage_offset(), tuple(view.shape), view.stride()), shape, tuple(wanted.stride())
    )
    if located is None:
        assert view.numel() == 0 or not _is_affine_box(source, view, wanted)
        return
    got = torch.zeros_like(wanted)
    box = located.box
    part = source[tuple(slice(span.start, span.stop) for span in box.spans)]
    torch.as_strided(got, box.shape, located.strides).copy_(part)
    assert box.numel == view.numel()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 6), (12, 1)), ((4, 6), (0, 1)), ((4,), (5,)), ((8,), (1,)), ((3, 3), (3, 1))],
    ids=["every second row", "broadcast", "diagonal", "wraps into the next row", "one row and a half"],
)
def test_views_that_are_no_box_are_refused(shape, strides):
    assert locate(StridedView(0, shape, strides), (4, 6), row_major_strides(shape)) is None
