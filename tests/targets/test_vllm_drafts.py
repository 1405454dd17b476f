"""A Megatron policy with a layer for multi-token prediction, and vLLM engines with and without a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import free_port
from rank_scripts import run_ranks
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("vllm_drafts.py")
DRAFTER = "model.layers.4."
COPIES = {
    f"{DRAFTER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{DRAFTER}shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    from vllm_refits import write_checkpoint

    folder = tmp_path_factory.mktemp("drafts")
    for seed, name in enumerate("ab"):
        file = write_checkpoint("glm with a drafter", folder / name, seed=seed) / "model.safetensors"
        tensors = load_file(file)
        # Megatron has these once.
        tensors |= {copy: tensors[original].clone() for copy, original in COPIES.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("engine", "layout"), [("drafts", "tp2"), ("drafts", "pp2"), ("main model only", "tp2")])
def test_a_drafter_is_delivered_or_skipped_and_reported(tmp_path, checkpoints, engine, layout):
    environment = {
        "CHANNEL_PORTS": f"{free_port()},{free_port()}",
        "LAYOUT": layout,
        "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1",
    }
    first, *_, served = run_ranks(SCRIPT, tmp_path, [str(checkpoints), engine], world_size=3, environment=environment)
    drafts = engine == "drafts"
    assert served["drafter"] is drafts
    assert any(name.startswith("drafter.model.layers.4.mtp_block") for name in served["differ before"]) is drafts
    assert [served[f"{version}: differs from a fresh {name}"] for version, name in enumerate("bab")] == [[], [], []]
    names = {name for name in load_file(checkpoints / "a/model.safetensors") if name.startswith(DRAFTER)}
    for report in first["reports"]:
        ((reason, skipped),) = report["summary"]["skipped"].items()
        if drafts:
            assert (reason, set(skipped)) == ("the targets' loaders ignore it", COPIES.keys())
        else:
            assert reason == "multi-token prediction: no target drafts"
            assert {name for name in skipped if ".experts." not in name} == {n for n in names if ".experts." not in n}
            assert {name for name in skipped if ".experts." in name} == {
                f"{DRAFTER}mlp.experts.{projection}_proj.weight" for projection in ("gate", "up", "down")
            }
