"""`refit-transport run` for every kind of model and for the layouts that `test_refit.py` has no room for.

Each run compares log-probabilities of trainer and samplers after each refit, verifies every box, and must move exactly
what was planned without it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support_records import SupportRecord
from test_run_command import Run, with_changes

from refit_transport.config.load import load_config
from refit_transport.preview import preview
from refit_transport.transports.registry import resolve

pytestmark = pytest.mark.e2e

_MIXED = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
}
_TENSOR = {"tensor_model_parallel_size": 2}
_STAGES = {"pipeline_model_parallel_size": 2}
_EXPERTS = {"expert_model_parallel_size": 2}
_VLLM_TENSOR, _VLLM_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
_SPREAD = _VLLM_TENSOR | {"expert_parallel_size": 2}


@dataclass
class Case:
    """A kind of model, the training layout's name and keys, the engines' name and keys, and how many ranks generate."""

    kind: str
    source: str
    train: dict[str, Any]
    target: str
    serve: dict[str, Any]
    generate: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    nightly: bool = True
    precision: str = "float32"
    tolerance: float = 1e-4

    @property
    def marked(self) -> Any:
        marks = [pytest.mark.nightly] if self.nightly else []
        return pytest.param(self, id=f"{self.kind} {self.source} -> {self.target}", marks=marks)


CASES = (
    Case("gpt_oss", "EP2", _EXPERTS, "PP2", _VLLM_STAGES, nightly=False),
    Case("gpt_oss", "TP2 EP2 ETP1", _MIXED, "TP2 EP", _SPREAD),
    Case("nemotron_h", "TP2", _TENSOR, "PP2", _VLLM_STAGES),
    Case("nemotron_h", "PP2", _STAGES, "TP2", _VLLM_TENSOR),
    Case("nemotron_h_moe", "TP2 EP2 ETP1", _MIXED, "TP2 EP", _SPREAD),
    Case("nemotron_h_moe", "EP2", _EXPERTS, "TP2", _VLLM_TENSOR),
    # vLLM's Gated DeltaNet on CPU takes bfloat16 only.
    Case("qwen3_next", "TP2 EP2 ETP1", _MIXED, "TP2", _VLLM_TENSOR, precision="bfloat16", tolerance=0.05),
    Case("qwen3_next", "EP2", _EXPERTS, "PP2", _VLLM_STAGES, precision="bfloat16", tolerance=0.05),
    Case("gemma", "TP2", _TENSOR, "TP2", _VLLM_TENSOR),
    Case("gemma", "PP2", _STAGES, "PP2", _VLLM_STAGES),
    Case("llama", "PP2", _STAGES, "PP2, 2 engines", _VLLM_STAGES, generate=4),
    Case("llama", "TP2", _TENSOR, "TP2 PP2", _VLLM_TENSOR | _VLLM_STAGES, generate=4),
    Case("llama", "PP2, tied", _STAGES, "PP2", _VLLM_STAGES, model={"tie_word_embeddings": True}),
    Case("mistral", "TP2", _TENSOR, "PP2", _VLLM_STAGES),
    Case("mixtral", "TP2 EP2 ETP1", _MIXED, "TP2 EP", _SPREAD),
    Case("qwen2", "PP2", _STAGES, "TP2", _VLLM_TENSOR),
    # Under tensor parallelism Megatron's local modules cut latent down projections, which plans give to every rank.
    Case("deepseek_v2", "EP2", _EXPERTS, "TP2 EP", _SPREAD),
    Case("deepseek_v3", "EP2", _EXPERTS, "PP2", _VLLM_STAGES),
    Case("glm", "TP2 EP2 ETP1", _MIXED, "PP2", _VLLM_STAGES),
    Case("moe", "EP2", _EXPERTS, "TP2 EP, 2 engines", _SPREAD, generate=4),
    Case("moe", "EP2", _EXPERTS, "TP2 PP2 EP", _SPREAD | _VLLM_STAGES, generate=4),
)


@pytest.mark.parametrize("case", [case.marked for case in CASES])
def test_a_run_trains_refits_and_agrees(case: Case, tmp_path: Path, support_record: SupportRecord) -> None:
    row = {"architecture": case.kind, "source": case.source, "target": case.target}
    support_record(**row)
    config = with_changes(
        cluster__gpus_per_node=2 + case.generate,
        policy__precision=case.precision,
        policy__megatron_cfg=case.train,
        policy__generation__colocated={"enabled": False, "resources": {"gpus_per_node": case.generate}},
        policy__generation__vllm_cfg=case.serve,
        refit_run__tiny_model={"kind": case.kind, **case.model},
        refit_run__logprob_tolerance=case.tolerance,
        policy__generation__refit_cfg__nccl_reshard={
            "coverage": "all",
            "verify": "full",
            "timeout_s": 100,
            "topology": {"domains": "per_role"},
        },
    )
    code, output, errors = Run(tmp_path, config, "--json").finish(timeout_s=400.0)
    assert code == 0, errors
    rounds = json.loads(output)["rounds"]
    assert [found["version"] for found in rounds] == [1, 2]
    for found in rounds:
        assert found["largest_difference"] <= case.tolerance < found["largest_change"]
        assert sum(rank["verified"] for rank in found["report"]["ranks"]) > 0
        assert found["report"]["summary"] == _planned(tmp_path)
    support_record(
        **row, shard_to_shard=1.0, proof="trained, refitted twice by `run`, log-probabilities of the trainer"
    )


def _planned(folder: Path) -> dict[str, Any]:
    """What `plan` says of the very file that `run` read."""
    found = preview(load_config(folder / "job.yaml", resolve_transport=resolve), announce=lambda _: None).summary
    assert found.whole == {}
    assert found.shard_to_shard == 1.0
    return json.loads(json.dumps(asdict(found)))
