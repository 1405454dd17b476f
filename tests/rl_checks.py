"""Whole tensors from what ranks hold, as the tests of reinforcement learning compare them."""

from __future__ import annotations

import numpy as np
from rl_ranks import Box

from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import TensorSpec


def assemble(ranks: list[list[Box]], prefix: str = "") -> dict[str, np.ndarray]:
    """Whole tensors of all ranks' boxes, under checkpoint names; copies must be equal to the bit."""
    whole: dict[str, np.ndarray] = {}
    for box in (box for boxes in ranks for box in boxes if box.tensor.startswith(prefix)):
        name = box.tensor.removeprefix(prefix)
        full = whole.setdefault(name, np.full(box.shape, np.nan, np.float32))
        place = full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.values.shape, strict=True))]
        known = ~np.isnan(place)
        assert np.array_equal(place[known], box.values[known]), f"copies of {name} differ"
        place[...] = box.values
    found = {}
    for name, full in whole.items():
        assert not np.isnan(full).any(), f"{name} is not covered"
        for entry in checkpoint_entries(TensorSpec(name, full.shape, "float32")):
            found[entry.name] = full if entry.expert is None else full[entry.expert]
    return found
