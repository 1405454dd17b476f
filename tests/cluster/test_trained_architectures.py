"""Training steps of every architecture against the same steps of Hugging Face's model, weight by weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_checks import assemble
from megatron_models import checkpoint_tensors, load_model, make_checkpoint, model_logprobs, sequences, train_model
from megatron_ranks import loaded_and_trained
from rank_pool import RankPool

from refit_transport.layout.manifest import Manifest
from refit_transport.layout.parallelism import MegatronParallelism as Cut

LEARNING_RATE = 1e-3


@dataclass
class Case:
    kind: str
    layout: str
    cut: Cut
    ranks: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    nightly: bool = True
    # How much further rounding may take losses and log-probabilities apart.
    noise: float = 1.0

    @property
    def marked(self) -> Any:
        marks = [pytest.mark.nightly] if self.nightly else []
        return pytest.param(self, id=f"{self.kind}-{self.layout}", marks=marks)


_MIXED = Cut(2, expert=2, expert_tensor=1, sequence_parallel=True)
_FOUR = Cut(2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True)
CASES = (
    Case("gpt_oss", "tp2-ep2-etp1-sp", _MIXED, nightly=False),
    Case("nemotron_moe", "tp2-ep2-etp1-sp", _MIXED, nightly=False),
    Case("qwen3_next", "tp2-etp2-sp", Cut(2, expert_tensor=2, sequence_parallel=True), nightly=False, noise=100),
    Case("gemma", "tp2-pp2-vpp2", Cut(2, pipeline=2, virtual_pipeline=2), 4),
    Case("gemma", "pp2", Cut(pipeline=2)),
    Case("gemma", "tp2-sp", Cut(2, sequence_parallel=True), nightly=False),
    Case("gpt_oss", "ep2", Cut(expert=2)),
    Case("gpt_oss", "pp2-vpp2", Cut(pipeline=2, virtual_pipeline=2)),
    Case("gpt_oss", "tp2-pp2-ep2-etp1", _FOUR, 4),
    Case("nemotron", "tp2", Cut(2)),
    Case("nemotron", "pp2", Cut(pipeline=2)),
    Case("nemotron", "dp2", Cut()),
    Case("nemotron_moe", "ep2", Cut(expert=2)),
    Case("qwen3_next", "pp2-vpp2", Cut(pipeline=2, virtual_pipeline=2), noise=100),
    Case("qwen3_next", "dp2", Cut(), noise=100),
    Case("qwen3_next", "tp2-pp2-ep2-etp1", _FOUR, 4, noise=100),
    Case("llama", "tp2-sp", Cut(2, sequence_parallel=True)),
    Case("mixtral", "tp2-ep2-etp1-sp", _MIXED),
    Case("deepseek_v2", "tp2-ep2-etp1-sp", _MIXED),
    Case("deepseek_v3", "tp2-ep2-etp1-sp", _MIXED),
    Case("glm", "tp2-ep2-etp1-sp", _MIXED),
)


@pytest.mark.e2e
@pytest.mark.parametrize("case", [case.marked for case in CASES])
def test_steps_change_every_weight_as_hugging_face_does(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    folder = make_checkpoint(tmp_path / "model", kind=case.kind, **case.model)
    model = load_model(folder)
    batches = [sequences(vocab=256, lengths=(13, 9, 11, 13), seed=step) for step in range(3)]
    prompts = sequences(vocab=256, lengths=(12, 5, 9), seed=99)
    outcomes = pool.run(
        loaded_and_trained,
        checkpoint=folder,
        parallelism=case.cut,
        batches=batches,
        prompts=prompts,
        options={"learning_rate": LEARNING_RATE},
    )
    losses = train_model(model, batches, learning_rate=LEARNING_RATE)
    model.save_pretrained(tmp_path / "trained")
    manifest = Manifest.of(outcome.snapshots["trained"].manifest for outcome in outcomes)
    trained = assemble([outcome.snapshots["trained"] for outcome in outcomes], manifest)
    before, expected = checkpoint_tensors(folder), checkpoint_tensors(tmp_path / "trained")
    assert trained.keys() == expected.keys()
    off = {}
    for name, tensor in expected.items():
        change = np.abs(tensor.numpy() - before[name].numpy()).mean()
        difference = np.abs(trained[name] - tensor.numpy()).mean()
        if difference > 0.02 * change + 1e-7:
            off[name] = (change, difference)
        assert change or name.endswith("e_score_correction_bias"), name
    assert off == {}
    for outcome in outcomes:
        assert np.allclose(outcome.losses, losses, atol=1e-5 * case.noise, rtol=0), (outcome.losses, losses)
    found, wanted = (_flat(table) for table in (outcomes[0].logprobs["trained"], model_logprobs(model, prompts)))
    assert np.allclose(found, wanted, atol=1e-4 * case.noise, rtol=0)


def _flat(table: list[list[float]]) -> list[float]:
    return [value for row in table for value in row]
