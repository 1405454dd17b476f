"""Real Megatron ranks against the real Hugging Face model and a hand-written exporter, layout by layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_checks import assert_same, check_weights
from megatron_models import (
    checkpoint_tensors,
    load_model,
    make_checkpoint,
    model_logprobs,
    sequences,
    train_model,
)
from megatron_ranks import full_life
from preset_checks import contents
from rank_pool import RankPool

from refit_transport.layout.manifest import Manifest
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import source_manifest
from refit_transport.layout.presets.model import LogicalModel

LEARNING_RATE = 1e-3


@dataclass
class Case:
    name: str
    parallelism: MegatronParallelism
    kind: str = "qwen3"
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


CASES = (
    Case("dense-tp2", MegatronParallelism(tensor=2)),
    Case("dense-tp2-sp", MegatronParallelism(tensor=2, sequence_parallel=True)),
    Case("dense-dp2", MegatronParallelism()),
    Case("dense-pp2", MegatronParallelism(pipeline=2), options={"micro_batch_size": 2}),
    Case("dense-pp2-uneven", MegatronParallelism(pipeline=2, last_stage_layers=1)),
    Case("dense-pp2-vpp2", MegatronParallelism(pipeline=2, virtual_pipeline=2)),
    Case("tied-pp2", MegatronParallelism(pipeline=2), model={"tie_word_embeddings": True}),
    Case("tied-tp2", MegatronParallelism(tensor=2), model={"tie_word_embeddings": True}),
    Case("one-kv-head-tp2", MegatronParallelism(tensor=2), model={"num_key_value_heads": 1}),
    Case("qkv-bias-tp2", MegatronParallelism(tensor=2), kind="qwen2"),
    Case(
        "vocab251-tp2",
        MegatronParallelism(tensor=2),
        model={"vocab_size": 251},
        options={"make_vocab_size_divisible_by": 128},
    ),
    Case("moe-tp2-ep2-etp1", MegatronParallelism(2, expert=2, expert_tensor=1, sequence_parallel=True), "qwen3_moe"),
    Case("moe-ep2", MegatronParallelism(expert=2), "qwen3_moe", {"norm_topk_prob": False}),
    Case("moe-tp2-etp2", MegatronParallelism(2, expert_tensor=2, sequence_parallel=True), "qwen3_moe"),
    Case("moe-tp2-etp1-ep1", MegatronParallelism(2, expert_tensor=1, sequence_parallel=True), "qwen3_moe"),
    Case("moe-mixed-pp2", MegatronParallelism(pipeline=2), "qwen3_moe", {"mlp_only_layers": [1, 2]}),
    Case(
        "moe-tp2-pp2-ep2-etp1",
        MegatronParallelism(2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True),
        "qwen3_moe",
        ranks=4,
    ),
    Case(
        "tied-tp2-pp2-vpp2-sp",
        MegatronParallelism(2, pipeline=2, virtual_pipeline=2, sequence_parallel=True),
        model={"tie_word_embeddings": True},
        ranks=4,
    ),
)


def _largest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layout_holds_trains_and_describes_the_checkpoint(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    folder = make_checkpoint(tmp_path, kind=case.kind, **case.model)
    model = load_model(folder)
    logical = LogicalModel.from_config(model.config.to_dict())
    batches = [sequences(vocab=logical.vocab, lengths=(13, 9, 11, 13), seed=step) for step in range(3)]
    prompts = sequences(vocab=logical.vocab, lengths=(12, 5, 9), seed=99)

    outcomes = pool.run(
        full_life,
        checkpoint=folder,
        parallelism=case.parallelism,
        batches=batches,
        prompts=prompts,
        options={"learning_rate": LEARNING_RATE, **case.options},
    )

    preset = source_manifest(
        logical,
        case.parallelism,
        world_size=case.ranks,
        dtype="float32",
        make_vocab_size_divisible_by=case.options.get("make_vocab_size_divisible_by", 1),
    )
    assert contents(preset) == contents(Manifest.of(outcome.snapshots["loaded"].manifest for outcome in outcomes))
    tensors = check_weights(outcomes, logical, dtype="float32")
    assert_same(tensors["loaded"], {name: value.numpy() for name, value in checkpoint_tensors(folder).items()})
    assert _largest(outcomes[0].logprobs["loaded"], model_logprobs(model, prompts)) <= 1e-5
    losses = train_model(model, batches, learning_rate=LEARNING_RATE)
    for outcome in outcomes:
        assert outcome.logprobs == outcomes[0].logprobs
        assert np.allclose(outcome.losses, losses, atol=1e-5, rtol=0), (outcome.losses, losses)
    assert _largest(outcomes[0].logprobs["trained"], model_logprobs(model, prompts)) <= 1e-4
    assert _largest(outcomes[0].logprobs["trained"], outcomes[0].logprobs["loaded"]) > 1e-2
    assert _largest(outcomes[0].logprobs["perturbed"], outcomes[0].logprobs["trained"]) > 1e-2
