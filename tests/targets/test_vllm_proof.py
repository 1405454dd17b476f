"""Comparisons of the proof that live weights are what was loaded; `test_vllm_target.py` has the proof itself."""

from __future__ import annotations

import pytest
import torch

proof = pytest.importorskip("refit_transport.targets.vllm_proof")


def test_bits_are_compared_whatever_the_strides():
    """A loader that copies one row onto several reads it with stride 0."""
    row = torch.tensor([-0.0], dtype=torch.bfloat16)
    assert proof.same_bytes(row.expand(4), row.repeat(4))
    assert not proof.same_bytes(row.expand(4), row.repeat(4).abs())
    single = torch.as_strided(row, (1,), (0,))
    assert proof.same_bytes(single, row)
    assert not proof.same_bytes(single, row.abs())
    assert proof.same_bytes(row[:0], row[:0])
    assert proof.same_bytes(torch.full((2,), torch.nan), torch.full((2, 2), torch.nan)[:, 0])
