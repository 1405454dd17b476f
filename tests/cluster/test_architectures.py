"""Every architecture that workers train: real Megatron ranks against the real Hugging Face model.

Ranks load a checkpoint through the naming table, so Hugging Face's log-probabilities say whether names and row order
are right; and what they hold after a change, put into Hugging Face's model, must give Megatron's log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_checks import assemble, assert_same
from megatron_models import checkpoint_tensors, load_model, make_checkpoint, model_logprobs, sequences
from megatron_ranks import loaded_and_changed
from preset_checks import contents
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from support_names import architecture, training_layout
from support_records import SupportRecord, supports

from refit_transport.config.checkpoint_config import read_config
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.planning.planner import plan_transfer
from refit_transport.sources.naming import check_complete

Cut = MegatronParallelism


@dataclass
class Case:
    kind: str
    layout: str
    cut: MegatronParallelism
    ranks: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    nightly: bool = True

    @property
    def marked(self) -> Any:
        row = supports(
            architecture=architecture(self.kind, self.model),
            source=training_layout(self.cut, ranks=self.ranks),
            target="TP1, TP2, TP2 x DP2",
            level="held",
        )
        marks = [row, *([pytest.mark.nightly] if self.nightly else [])]
        return pytest.param(self, id=f"{self.kind}-{self.layout}", marks=marks)


_VOCAB = {"vocab_size": 151}
_PADDED = {"make_vocab_size_divisible_by": 16}
_FIVE = {"num_hidden_layers": 5}
_MIXED = Cut(2, expert=2, expert_tensor=1, sequence_parallel=True)
_FOUR = Cut(2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True)


def _sparse(kind: str, six: dict[str, Any], four: MegatronParallelism = _FOUR, **model: Any) -> list[Case]:
    """Layouts of a model with experts: one in CI, the others at other awkward borders."""
    return [
        Case(kind, "tp2-ep2-etp1-vocab151", _MIXED, model=_VOCAB | model, options=_PADDED, nightly=False),
        Case(kind, "tp1-etp2", Cut(expert_tensor=2), model=model),
        Case(kind, "pp2-of-5", Cut(pipeline=2, last_stage_layers=2), model=_FIVE | model),
        Case(kind, "ep2-of-6", Cut(expert=2), model=six | model),
        Case(kind, "tp2-pp2-ep2-etp1", four, 4, model=_VOCAB | model),
    ]


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
CASES = (
    Case("llama", "tp4-of-2-kv-heads-vocab151", Cut(4), 4, _VOCAB, _PADDED, nightly=False),
    Case(
        "llama",
        "pp4-vpp2-of-14",
        Cut(pipeline=4, virtual_pipeline=2, last_stage_layers=2),
        4,
        {"num_hidden_layers": 14},
    ),
    Case("llama", "pp2-of-5-tied", Cut(pipeline=2, last_stage_layers=2), 2, _FIVE | {"tie_word_embeddings": True}),
    Case("llama", "tp2-sp-llama3", Cut(2, sequence_parallel=True), 2, {"rope_parameters": _LLAMA3}),
    Case("llama", "dp2", Cut(), 2, {"vocab_size": 1003}),
    Case("qwen2", "tp4-of-2-kv-heads", Cut(4), 4, _VOCAB, _PADDED),
    Case("qwen2", "pp2-of-5", Cut(pipeline=2, last_stage_layers=2), 2, _FIVE),
    Case("qwen2", "tp2-pp2-vpp2", Cut(2, pipeline=2, virtual_pipeline=2), 4),
    Case("qwen3", "tp4-of-2-kv-heads", Cut(4), 4, {"vocab_size": 1003}, _PADDED),
    *_sparse("qwen3_moe", {"num_experts": 6}),
    *_sparse("mixtral", {"num_local_experts": 6}),
    *_sparse("deepseek_v2", {"n_routed_experts": 6}),
    *_sparse("deepseek_v3", {"n_routed_experts": 6}),
    *_sparse("glm", {"n_routed_experts": 6}, vocab_size=153),
    Case("nemotron", "tp4-of-2-kv-heads-vocab151", Cut(4), 4, _VOCAB, _PADDED),
    Case("nemotron", "tp2", Cut(2)),
    Case("nemotron", "pp2-uneven", Cut(pipeline=2, last_stage_layers=1)),
    Case("nemotron", "tp2-pp2-sp", Cut(2, pipeline=2, sequence_parallel=True), 4),
    *_sparse("nemotron_moe", {"n_routed_experts": 6}, replace(_FOUR, last_stage_layers=2)),
    # Megatron has biases of experts only where ETP is 1.
    *(case for case in _sparse("gpt_oss", {"num_local_experts": 6}) if case.layout != "tp1-etp2"),
    Case("gpt_oss", "tp4-of-2-kv-heads", Cut(4, expert=4, expert_tensor=1, sequence_parallel=True), 4),
    *_sparse("qwen3_next", {"num_experts": 6}),
    Case("deepseek_v3", "tp4", Cut(4, expert=2, expert_tensor=2, sequence_parallel=True), 4),
    Case("glm", "tp4-of-2-kv-heads", Cut(4, expert=4, expert_tensor=1, sequence_parallel=True), 4),
)


def _largest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("case", [case.marked for case in CASES])
def test_ranks_hold_what_hugging_face_computes_with(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest, support_record: SupportRecord
) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if case.ranks == 2 else "four_ranks")
    folder = make_checkpoint(tmp_path, kind=case.kind, **case.model)
    logical = LogicalModel.from_config(read_config(folder))
    prompts = sequences(vocab=logical.vocab, lengths=(12, 5, 9), seed=99)

    outcomes = pool.run(
        loaded_and_changed, checkpoint=folder, parallelism=case.cut, prompts=prompts, options=case.options
    )

    manifest = Manifest.of(outcome.snapshots["loaded"].manifest for outcome in outcomes)
    check_complete(manifest, logical)
    padding = case.options.get("make_vocab_size_divisible_by", 1)
    preset = source_manifest(
        logical,
        case.cut,
        world_size=case.ranks,
        dtype="float32",
        make_vocab_size_divisible_by=padding,
        spec="local",
    )
    assert contents(manifest) == contents(preset)
    for engines in (EngineParallelism(), EngineParallelism(2), EngineParallelism(2, 2, 4 if logical.experts else 1)):
        served = target_manifest(logical, engines, first_rank=case.ranks, dtype="float32")
        plan_transfer(manifest, served).check(manifest, served)
    tensors = {
        stage: assemble([outcome.snapshots[stage] for outcome in outcomes], manifest)
        for stage in ("loaded", "perturbed")
    }
    assert_same(tensors["loaded"], {name: value.numpy() for name, value in checkpoint_tensors(folder).items()})
    assert _largest(outcomes[0].logprobs["loaded"], model_logprobs(load_model(folder), prompts)) <= 5e-5
    save_file({name: torch.from_numpy(value) for name, value in tensors["perturbed"].items()}, folder / "changed")
    assert load_file(folder / "changed").keys() == tensors["loaded"].keys()
    (folder / "changed").rename(folder / "model.safetensors")
    assert _largest(outcomes[0].logprobs["perturbed"], model_logprobs(load_model(folder), prompts)) <= 5e-5
    assert _largest(outcomes[0].logprobs["perturbed"], outcomes[0].logprobs["loaded"]) > 1e-2
    support_record(proof="pieces bit-exact, log-probabilities of Hugging Face, plans proved")


@pytest.mark.e2e
def test_router_biases_stay_wide_beside_narrow_weights(tmp_path: Path, two_ranks: RankPool) -> None:
    """Megatron would widen them in the first forward pass, and the manifest would no longer be true."""
    folder = make_checkpoint(tmp_path, kind="deepseek_v3", num_hidden_layers=2)
    prompts = sequences(vocab=256, lengths=(5,), seed=1)
    outcomes = two_ranks.run(
        loaded_and_changed, checkpoint=folder, parallelism=Cut(), prompts=prompts, options={"precision": "bfloat16"}
    )
    for outcome in outcomes:
        assert outcome.snapshots["loaded"].manifest == outcome.snapshots["perturbed"].manifest
        dtypes = {spec.name: spec.dtype for spec in outcome.snapshots["loaded"].manifest.tensors}
        wide = [name for name, dtype in dtypes.items() if dtype == "float32"]
        assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"]
