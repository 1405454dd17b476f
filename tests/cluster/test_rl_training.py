"""Updates of policy and critic on real Megatron ranks, layout by layout, against plain torch on the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_oracle
from megatron_models import load_model, make_checkpoint, model_logprobs
from rank_pool import RankPool
from rl_ranks import Box, learn

from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.rl.trajectories import TrainBatch

STEPS = 3


@dataclass(frozen=True)
class Case:
    name: str
    parallelism: MegatronParallelism
    kind: str = "qwen3"
    tied: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    ranks: int = 2
    nightly: bool = False


CASES = (
    Case("tp2", MegatronParallelism(2), nightly=True),
    Case("tp2-sp", MegatronParallelism(2, sequence_parallel=True), options={"micro_batch_size": 3}),
    Case("dp2", MegatronParallelism()),
    Case("pp2-vpp2", MegatronParallelism(pipeline=2, virtual_pipeline=2), options={"micro_batch_size": 2}),
    Case("tied-pp2", MegatronParallelism(pipeline=2), tied=True),
    Case("tied-tp2", MegatronParallelism(2), tied=True, nightly=True),
    Case("moe-ep2", MegatronParallelism(expert=2), "qwen3_moe", options={"micro_batch_size": 2}),
    Case("moe-tp2-etp2", MegatronParallelism(2, expert_tensor=2, sequence_parallel=True), "qwen3_moe"),
    Case("moe-tp2-etp1", MegatronParallelism(2, expert_tensor=1, sequence_parallel=True), "qwen3_moe", nightly=True),
    Case(
        "moe-tp2-pp2-ep2-etp1",
        MegatronParallelism(2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True),
        "qwen3_moe",
        ranks=4,
    ),
    Case(
        "tied-tp2-pp2-vpp2-sp",
        MegatronParallelism(2, pipeline=2, virtual_pipeline=2, sequence_parallel=True),
        tied=True,
        ranks=4,
        nightly=True,
    ),
)


@dataclass(frozen=True)
class Setup:
    folder: Path
    batch: TrainBatch
    policy: training_oracle.Learned
    values: training_oracle.Learned


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def prepare(kind: str, tied: bool) -> Setup:
        # An odd vocabulary, so that there is padding under tensor parallelism.
        folder = make_checkpoint(
            tmp_path_factory.mktemp("checkpoint"), kind=kind, tie_word_embeddings=tied, vocab_size=101
        )
        batch = training_oracle.make_batch(folder, vocab=101)
        policy = training_oracle.learn_policy(folder, batch, steps=STEPS)
        return Setup(folder, batch, policy, training_oracle.learn_values(folder, batch, steps=STEPS))

    return prepare


def _params() -> list[Any]:
    marks = {True: [pytest.mark.nightly], False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.nightly]) for case in CASES]


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


def _close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], *, atol: float) -> None:
    assert sorted(got) == sorted(want)
    worst = {name: float(abs(got[name] - want[name]).max()) for name in want}
    assert max(worst.values()) <= atol, sorted(worst.items(), key=lambda item: -item[1])[:5]


def _learn(case: Case, role: str, setup: Setup, request: pytest.FixtureRequest) -> list[Any]:
    pool: RankPool = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    outcomes = pool.run(
        learn,
        role=role,
        checkpoint=setup.folder,
        parallelism=case.parallelism,
        batch=setup.batch,
        steps=STEPS,
        options={"make_vocab_size_divisible_by": 2, **case.options},
    )
    for outcome in outcomes[1:]:
        assert outcome.updates == outcomes[0].updates
        assert outcome.scores == [None] * STEPS
    return outcomes


@pytest.mark.e2e
@pytest.mark.parametrize("case", _params())
def test_policy_updates_are_those_of_the_whole_model(case: Case, setups: Any, request: pytest.FixtureRequest) -> None:
    setup: Setup = setups(case.kind, case.tied)
    want = setup.policy
    outcomes = _learn(case, "policy", setup, request)

    updates = outcomes[0].updates
    assert np.allclose([each.loss.loss for each in updates], want.losses, atol=2e-6, rtol=0)
    assert np.allclose([each.entropy for each in updates], want.entropies, atol=1e-5, rtol=0)
    assert np.allclose([each.grad_norm for each in updates], want.norms, rtol=1e-5)
    assert np.allclose([each.loss.clip_fraction for each in updates], want.clipped, atol=1e-6)
    assert {(each.tokens, each.samples) for each in updates} == {(42, 6)}
    # The case is one in which everything matters: some tokens are clipped, and so is the gradient.
    assert 0.05 < want.clipped[0] < 0.95
    assert min(want.norms) > 2 * training_oracle.CLIP
    _close(assemble([outcome.gradients for outcome in outcomes]), want.gradients, atol=1e-6)
    _close(assemble([outcome.state for outcome in outcomes], "weight/"), want.weights, atol=2e-6)

    batch, mask = setup.batch, setup.batch.response_mask.bool()
    before = model_logprobs(
        load_model(setup.folder), [row[: _used(batch, i)].tolist() for i, row in enumerate(batch.tokens)]
    )
    first = outcomes[0].scores[0]
    for row, numbers in enumerate(before):
        assert np.allclose(first[row, : len(numbers)], numbers, atol=1e-5)
    reference, trained = outcomes[0].reference
    assert torch.equal(reference, first)
    assert (trained - reference)[mask].abs().max() > 1e-2


def _used(batch: TrainBatch, row: int) -> int:
    return int(batch.response_mask[row].nonzero()[-1]) + 2


@pytest.mark.e2e
@pytest.mark.parametrize("case", _params())
def test_critic_updates_are_those_of_the_whole_model(case: Case, setups: Any, request: pytest.FixtureRequest) -> None:
    setup: Setup = setups(case.kind, case.tied)
    want = setup.values
    outcomes = _learn(case, "critic", setup, request)

    updates = outcomes[0].updates
    assert np.allclose([each.loss.loss for each in updates], want.losses, atol=2e-6, rtol=0)
    assert np.allclose([each.grad_norm for each in updates], want.norms, rtol=1e-5)
    _close(assemble([outcome.gradients for outcome in outcomes]), want.gradients, atol=1e-6)
    _close(assemble([outcome.state for outcome in outcomes], "weight/"), want.weights, atol=2e-6)
    assert not outcomes[0].scores[0][setup.batch.response_mask.bool()].any()
    for step, scores in enumerate(outcomes[0].scores):
        for row in range(setup.batch.size):
            used = _used(setup.batch, row) - 1
            assert np.allclose(scores[row, :used], want.scores[step][row, :used], atol=1e-5)
