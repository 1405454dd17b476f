"""Save and resume: to the bit under the same layout, the same state under another, and never from half a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_oracle
from megatron_models import make_checkpoint
from rank_pool import RankPool
from rl_ranks import Box, refusals, resume, save_halfway
from test_rl_training import assemble

from refit_transport.layout.parallelism import MegatronParallelism

MOE = MegatronParallelism(2, expert=2, expert_tensor=1, sequence_parallel=True)
STAGES = MegatronParallelism(pipeline=2)


def _equal(one: list[Box], other: list[Box]) -> None:
    assert [(box.tensor, box.offset) for box in one] == [(box.tensor, box.offset) for box in other]
    different = [a.tensor for a, b in zip(one, other, strict=True) if not np.array_equal(a.values, b.values)]
    assert not different, different[:5]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("role", "kind", "parallelism", "precision", "other"),
    [
        pytest.param("policy", "qwen3_moe", MOE, "float32", STAGES, id="moe"),
        pytest.param("policy", "qwen3", STAGES, "bfloat16", MegatronParallelism(2), id="bf16-tied-pp2"),
        pytest.param("critic", "qwen3", STAGES, "float32", MegatronParallelism(), id="critic"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    role: str,
    kind: str,
    parallelism: MegatronParallelism,
    precision: str,
    other: MegatronParallelism,
    tmp_path: Path,
    two_ranks: RankPool,
) -> None:
    checkpoint = make_checkpoint(
        tmp_path / "model", kind=kind, tie_word_embeddings=precision == "bfloat16", vocab_size=101
    )
    batch = training_oracle.make_batch(checkpoint, vocab=101)
    options = {"make_vocab_size_divisible_by": 2, "precision": precision}
    common: dict[str, Any] = {
        "role": role,
        "checkpoint": checkpoint,
        "batch": batch,
        "folder": tmp_path / "saved",
        "options": options,
    }
    without_a_break = two_ranks.run(save_halfway, parallelism=parallelism, **common)
    again = two_ranks.run(resume, parallelism=parallelism, **common)
    for (saved, final), (restored, resumed) in zip(without_a_break, again, strict=True):
        _equal(restored.state, saved.state)
        assert np.array_equal(restored.random, saved.random)
        assert resumed.updates == final.updates
        _equal(resumed.state, final.state)
        assert any(not np.array_equal(a.values, b.values) for a, b in zip(saved.state, final.state, strict=True))

    # Another layout holds the same state; what it makes of it differs by rounding.
    elsewhere = two_ranks.run(resume, parallelism=other, **common)
    for half, (saved, moved) in enumerate(
        zip(zip(*without_a_break, strict=True), zip(*elsewhere, strict=True), strict=True)
    ):
        for prefix in ("weight/", "exp_avg/", "exp_avg_sq/"):
            want = assemble([rank.state for rank in saved], prefix)
            got = assemble([rank.state for rank in moved], prefix)
            assert sorted(got) == sorted(want)
            atol = 0 if half == 0 else 1e-5 if precision == "float32" else 3e-3
            for name in want:
                assert np.allclose(got[name], want[name], atol=atol, rtol=0), (prefix, name)


@pytest.mark.e2e
def test_half_a_checkpoint_is_never_taken_for_one(tmp_path: Path, two_ranks: RankPool) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", vocab_size=101)
    larger = make_checkpoint(tmp_path / "larger", vocab_size=102)
    for said in two_ranks.run(refusals, checkpoint=checkpoint, larger=larger, folder=tmp_path / "saved"):
        assert "rank 1" in said["rank 1 can't write"]
        assert "disk is full" in said["rank 1 can't write"]
        assert "is no whole checkpoint" in said["restore after the crash"]
        assert "exists already" in said["save over it"]
        assert "checkpoint of a policy; a critic can't" in said["as a critic"]
        assert "shape [102, 64] here, shape [101, 64] there" in said["into another model"]
        assert said["after a second attempt"] == "1 update"
        assert "can't be read" in said["with a damaged file"]
    assert not list(tmp_path.glob("*.partial"))
