"""The loader of a model of 235 billion parameters, traced as one of eight ranks: see `vllm_full_size.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from preset_checks import regions
from rank_scripts import run_ranks

from refit_transport.errors import LayoutError
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism, target_manifest
from refit_transport.layout.wire import manifest_from_json

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_full_size.py")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("model", "tensor", "rank"),
    [
        ("Qwen3-235B-A22B", 8, 3),
        pytest.param("GLM-4.5", 8, 7, marks=pytest.mark.nightly),
        pytest.param("DeepSeek-V3", 8, 3, marks=pytest.mark.nightly),
        pytest.param("NemotronH-47B", 4, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_full_size_loader_is_traced_in_seconds_and_without_weights(tmp_path, model, tensor, rank):
    found = run_ranks(SCRIPT, tmp_path, [model, str(tensor), str(rank)], world_size=1)[0]
    assert found["weight bytes"] > 20 << 30
    assert found["grown"] < 512 * MIB
    assert found["seconds"] < 60
    traced = manifest_from_json(found["manifest"])
    logical = LogicalModel.from_config(found["config"])
    assert traced.opaque == ()
    assert regions(traced) == regions(target_manifest(logical, EngineParallelism(tensor), first_rank=0).ranks[rank])


def test_an_engine_of_mxfp4_weights_is_refused():
    from refit_transport.targets.vllm import VllmTarget

    config = SimpleNamespace(model_config=SimpleNamespace(quantization="gpt_oss_mxfp4"))
    target = VllmTarget(torch.nn.Linear(2, 2), config)
    with pytest.raises(LayoutError, match=r"rank 5: .*got gpt_oss_mxfp4 weights, .*: start it from a BF16 checkpoint"):
        target.manifest(5, [])
