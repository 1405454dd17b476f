"""`refit-transport plan`: figures against hand-made sums, both forms of output, and what can't be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import SMALL
from typer.testing import CliRunner

from refit_transport.cli import app
from refit_transport.config.load import load_config
from refit_transport.config.model import logical_model
from refit_transport.errors import PlanError
from refit_transport.preview import preset_job
from refit_transport.sources.naming import expected_tensors
from refit_transport.testing.models import save_tiny_model
from refit_transport.transports.nccl_reshard import NcclReshard
from refit_transport.transports.registry import resolve

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs/demo.yaml")
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 1,
    "vocab_size": 151936,
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan(*arguments: str, config: str = DEMO) -> tuple[int, str, str]:
    overrides = [part for argument in arguments for part in (("--set", argument) if "=" in argument else (argument,))]
    result = CliRunner().invoke(app, ["plan", config, *overrides])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def planned(*arguments: str) -> dict:
    code, out, err = plan("--json", *arguments)
    assert code == 0, err
    return json.loads(out)


def model_bytes(*overrides: str) -> int:
    """Of all parameters of the demo's model, in float32."""
    config = load_config(DEMO, resolve_transport=resolve, overrides=overrides)
    return sum(4 * spec.box.numel for spec in expected_tensors(logical_model(config), dtype="float32"))


def test_a_table_for_people_and_nothing_else(tmp_path):
    code, out, err = plan()
    assert code == 0
    for words in (
        "Bytes of one refit by transport",
        "Heaviest ranks of each side, of 4",
        "coverage: all",
        "payloads: ",
        "checked: plan and schedules deliver every element",
        "as far as known without the engine",
    ):
        assert words in out
    assert "checking the schedule of nccl_reshard" in err
    assert list(tmp_path.iterdir()) == []


def test_each_domain_receives_the_model_once_and_each_rank_its_share():
    found = planned()
    total = model_bytes()
    assert found["summary"]["network_bytes"] == total
    assert found["checked"] is True
    loads = {load["rank"]: load for load in found["ranks"]}
    assert [loads[rank]["role"] for rank in range(4)] == ["source", "source", "target", "target"]
    assert sum(load["network_sent"] for load in loads.values()) == total
    assert loads[0]["received"] == loads[1]["received"] == 0
    for rank in (2, 3):
        assert loads[rank]["old_way_received"] == total
        assert total / 2 < loads[rank]["received"] < total
        assert loads[rank]["old_way_ratio"] == total / loads[rank]["received"]
        assert 0 < loads[rank]["staging"] <= 2 * 16 * 2**20
    assert {(route["transport"], route["reason"]) for route in found["routes"]} == {("nccl_reshard", "coverage: all")}


def test_routes_have_reasons_and_transports_their_own_figures():
    reshard = "policy.generation.refit_cfg.nccl_reshard"
    found = planned(f"{reshard}.coverage=ffn")
    assert {part["name"] for part in found["summary"]["transports"]} == {"nccl_reshard", "gather_broadcast"}
    assert sum(part["tensors"] for part in found["summary"]["transports"]) == len(found["routes"]) == 27
    sizes = {part["name"]: part["model_bytes"] for part in found["summary"]["transports"]}
    assert sum(sizes.values()) == model_bytes()
    # Two layers of 8 experts, each of three matrices of 64 x 64 in float32.
    assert sizes["nccl_reshard"] == 2 * 8 * 3 * 64 * 64 * 4
    assert found["summary"]["shard_to_shard"] == sizes["nccl_reshard"] / model_bytes()
    assert planned()["summary"]["shard_to_shard"] == 1
    assert found["payloads"].keys() == {"nccl_reshard", "gather_broadcast"}
    assert all(count > 0 for count in found["payloads"].values())
    by_rank = {load["rank"]: load["received"] for load in found["ranks"] if load["received"]}
    assert by_rank == {int(rank): nbytes for rank, nbytes in found["summary"]["received_by_rank"].items()}


def test_the_old_way_is_no_better_than_itself():
    found = planned("policy.generation.refit_transport=null", "policy.generation.refit_cfg.nccl_reshard=null")
    assert {load["old_way_ratio"] for load in found["ranks"] if load["received"]} == {1.0}


def test_the_topology_is_guessed_by_nodes_and_said_so():
    domains = "policy.generation.refit_cfg.nccl_reshard.topology.domains=auto"
    found = planned(domains)
    assert found["summary"]["network_bytes"] == 0
    assert any("node of 4 ranks" in text for text in found["assumptions"])
    assert not any("node of" in text for text in planned()["assumptions"])


@pytest.mark.parametrize(("fabric", "said"), [("auto", "as without GPUs"), ("gloo", "one NIC per domain, as always")])
def test_the_nics_are_guessed_by_the_fabric_and_said_so(fabric, said):
    settings = "policy.generation.refit_cfg.nccl_reshard"
    found = planned(f"{settings}.fabric={fabric}")["assumptions"]
    assert any(said in text for text in found)
    assert not any("NIC" in text for text in planned(f"{settings}.topology.nics=rank")["assumptions"])


def test_a_folder_with_only_a_config(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B))
    found = planned("refit_run.tiny_model=null", "policy.model_name=model", "policy.precision=bfloat16")
    layer = 128 * 3 * 2048 * 768 + 2048 * (32 + 4 + 4 + 32) * 128 + 128 * 2048 + 2 * 2048 + 2 * 128
    assert found["summary"]["network_bytes"] == 2 * (layer + 2 * 151936 * 2048 + 2048)
    assert [path.name for path in model.iterdir()] == ["config.json"]


def test_the_tiny_model_is_what_a_run_would_make(tmp_path):
    config = load_config(DEMO, resolve_transport=resolve)
    tiny = config.refit_run.tiny_model
    save_tiny_model(tmp_path / "made", kind=tiny.kind, **tiny.hf_config())
    overrides = ("refit_run.tiny_model=null", f"policy.model_name={tmp_path / 'made'}")
    made = load_config(DEMO, resolve_transport=resolve, overrides=overrides)
    assert preset_job(config).target == preset_job(made).target
    assert preset_job(config).source == preset_job(made).source


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["refit_run.tiny_model=null"], 2, "is no folder"),
        (["policy.megatron_cfg.expert_model_parallel_size=3"], 2, "8 experts"),
        (["policy.megatron_cfg.context_parallel_size=2"], 2, "context parallelism is not available yet"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_message(overrides, code, words):
    found, out, err = plan(*overrides)
    assert (found, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_layers_of_a_drafter_are_left_out_and_said_to_be(tmp_path):
    (tmp_path / "model").mkdir()
    deepseek = SMALL["deepseek"] | {"num_nextn_predict_layers": 1, "max_position_embeddings": 128}
    (tmp_path / "model/config.json").write_text(json.dumps(deepseek))
    model = ("refit_run.tiny_model=null", "policy.model_name=model")
    (reason,), (names,) = zip(*planned(*model)["summary"]["skipped"].items(), strict=True)
    assert reason == "multi-token prediction: the policy has no drafter"
    assert len(names) > 10
    assert {name.split(".")[2] for name in names} == {"4"}
    code, out, _ = plan(*model)
    assert code == 0
    assert "skipped, multi-token prediction: the policy has no drafter: model.layers.4." in " ".join(out.split())
    assert planned()["summary"]["skipped"] == {}


def test_an_unknown_architecture_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3_30B | {"architectures": ["GPT9"]}))
    code, _, err = plan("refit_run.tiny_model=null", "policy.model_name=model")
    assert code == 2
    assert "no supported architecture" in err


def test_a_schedule_that_does_not_deliver_fails(monkeypatch):
    def broken(self):
        raise PlanError("lm_head.weight", "[0:1, 0:1]", 2, "is delivered by nobody")

    monkeypatch.setattr(NcclReshard, "check", broken)
    code, out, err = plan()
    assert (code, out) == (1, "")
    assert "lm_head.weight" in err
    assert "is delivered by nobody" in err
