"""`refit-transport explain`: every parameter, its ranks, boxes and ways, against the plan's own traffic and by hand."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL
from typer.testing import CliRunner

from refit_transport.cli import app
from refit_transport.cli_explain import Explained, render_explained
from refit_transport.config.rules_limits import TRAINED
from refit_transport.config.settings import RefitSettings
from refit_transport.explain import explain
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.refit_plan import RefitPlan
from refit_transport.scheduling.schedule import total_traffic
from refit_transport.scheduling.topology import Topology
from refit_transport.simulation.presets import preset_manifests
from refit_transport.testing.strategies import manifest_pairs
from refit_transport.transports.base import Job

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs/demo.yaml")
RESHARD = "policy.generation.refit_cfg.nccl_reshard"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["explain", DEMO, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def groups(*arguments: str) -> list[dict]:
    code, out, err = run("--json", *arguments)
    assert code == 0, err
    return json.loads(out)["groups"]


@settings(max_examples=40)
@given(
    manifest_pairs(ranks="any"),
    st.sampled_from(("all", "ffn", "broadcast")),
    st.integers(1, 4),
    st.sampled_from(("domain", "rank")),
)
def test_ways_deliver_every_part_once_and_add_up_to_the_traffic(pair, kind, size, nics):
    source, target = pair
    ranks = sorted({ranked.rank for side in pair for ranked in side.ranks})
    topology = Topology.of([ranks[i : i + size] for i in range(0, len(ranks), size)], nics=nics)
    chosen = {"transport": "gather_broadcast"} if kind == "broadcast" else {"coverage": kind}
    plan = RefitPlan(Job(source, target, topology, RefitSettings(**chosen, bucket_bytes=256, staging_bytes=4096)))
    found = explain(plan)
    assert sorted(name for group in found for name in group.names) == sorted(spec.name for spec in source.tensors)
    moved: dict[tuple[str, int], float] = defaultdict(float)
    for group in found:
        for part in group.parts:
            got = dict.fromkeys(part.wanters, 0.0)
            for way in part.ways:
                assert way.relay == (way.receiver not in got)
                if not way.relay:
                    got[way.receiver] += way.share
                near = topology.is_local(way.sender, way.receiver)
                assert near == (way.arrival in ("copy", "local", "inside"))
                assert (way.sender in part.holders) or way.arrival in ("forward", "inside")
                ends = {"network": ("enter", "forward"), "local": ("local", "inside")}
                for name, arrivals in ends.items():
                    if way.arrival in arrivals:
                        nbytes = way.share * part.nbytes * len(group.names)
                        moved[f"{name}_sent", way.sender] += nbytes
                        moved[f"{name}_received", way.receiver] += nbytes
            assert got == pytest.approx(dict.fromkeys(part.wanters, 1.0))
    traffic = total_traffic(transport.traffic() for transport in plan.transports.values())
    for name in ("network_sent", "network_received", "local_sent", "local_received"):
        expected = getattr(traffic, name)
        assert {rank: moved[name, rank] for rank in expected} == pytest.approx(expected)


def test_every_parameter_is_in_one_group_with_its_ranks_and_boxes():
    found = groups()
    names = [name for group in found for name in group["parameters"]]
    assert len(names) == len(set(names)) == 27
    by_name = {name: group for group in found for name in group["parameters"]}
    experts = by_name["model.layers.1.mlp.experts.up_proj.weight"]
    assert experts["parameters"] == [f"model.layers.{layer}.mlp.experts.up_proj.weight" for layer in (0, 1)]
    assert (experts["transport"], experts["way"], experts["reason"]) == ("nccl_reshard", "messages", "coverage: all")
    assert (experts["source_ranks"], experts["target_ranks"]) == ([0, 1], [2, 3])
    # Four experts of each training rank, half of their 64 rows to each generation rank.
    assert experts["parts"][3] == {
        "boxes": [[[4, 8], [32, 64], [0, 64]]],
        "bytes": 4 * 32 * 64 * 4,
        "holders": [1],
        "wanters": [3],
        "ways": [{"arrival": "enter", "sender": 1, "receiver": 3, "share": 1.0}],
    }
    norm = by_name["model.norm.weight"]["parts"]
    assert [part["wanters"] for part in norm] == [[2, 3]]
    assert {way["arrival"] for way in norm[0]["ways"]} == {"enter", "inside"}


def test_people_read_the_boxes_of_what_they_ask_for():
    code, out, _ = run("--param", "*layers.1.mlp.experts.up_proj*")
    assert code == 0
    assert "model.layers.1.mlp.experts.up_proj.weight  [8, 64, 64] float32, 0.131 MB" in out
    assert "nccl_reshard, messages of the schedule, 100% shard to shard; because coverage: all" in out
    assert "box [4:8, 32:64, 0:64]: 0.033 MB, held by rank 1, wanted by rank 3" in out
    assert "enters the domain of ranks 2-3 at rank 3, from rank 1, which holds it" in out
    assert "down_proj" not in out


def test_what_is_gathered_says_why_and_through_whom():
    code, out, _ = run("--param", "model.norm.weight", "--set", f"{RESHARD}.coverage=ffn")
    assert code == 0
    assert "0% shard to shard; because coverage: ffn sends only FFN projections shard-to-shard" in out
    assert "rank 3 from rank 2 of the same domain, where it came in" in out
    _, out, _ = run("--set", f"{RESHARD}.routes=[{{pattern: '*norm*', transport: gather_broadcast}}]")
    assert "because routes: *norm*" in out
    assert "99." in out.splitlines()[0]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*up_prj.weight", "matches no parameter (got '*up_prj.weight'); the nearest of 27 names: model.layers.0.mlp"),
        ("model.embed.weight", "the nearest of 27 names: model.embed_tokens.weight"),
        ("re:layers[", "is no regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_near_names(pattern, words):
    code, out, err = run("--param", pattern)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("kind", "tensor", "half"),
    [
        # What each of two ranks has on either side: heads, or heads of 4 + 5 rows.
        ("gpt-oss", "model.layers.0.self_attn.sinks", (4,)),
        ("deepseek", "model.layers.1.self_attn.kv_b_proj.weight", (4 * 9, 6)),
        ("nemotron moe", "backbone.layers.0.mixer.A_log", (4,)),
        ("nemotron dense", "backbone.layers.2.mixer.D", (4,)),
        ("qwen3 next", "model.layers.0.linear_attn.dt_bias", (4,)),
        ("gemma text", "model.layers.3.mlp.gate_proj.weight", (24, 32)),
    ],
)
def test_every_architecture_with_a_preset_is_explained_though_workers_may_not_train_it(kind, tensor, half, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL[kind]))
    changes = ["refit_run.tiny_model=null", f"policy.model_name={tmp_path}"]
    model = LogicalModel.from_config(SMALL[kind])
    if not model.experts:
        changes.append("policy.megatron_cfg.expert_model_parallel_size=1")
    code, out, err = run("--json", *(part for change in changes for part in ("--set", change)))
    assert code == 0, err
    found = json.loads(out)
    names = [name for group in found["groups"] for name in group["parameters"]]
    assert sorted(names) == sorted(each.name for each in model.main)
    assert found["shard_to_shard"] == 1
    [group] = [group for group in found["groups"] if tensor in group["parameters"]]
    rest = [[0, size] for size in half[1:]]
    assert sorted((part["boxes"], part["holders"], part["wanters"]) for part in group["parts"]) == [
        ([[[0, half[0]], *rest]], [0], [2]),
        ([[[half[0], 2 * half[0]], *rest]], [1], [3]),
    ]
    untrained = [text for text in found["assumptions"] if "can't train" in text]
    assert len(untrained) == (model.architecture not in TRAINED)


@pytest.mark.parametrize("coverage", ["all", pytest.param("ffn", marks=pytest.mark.nightly)])
def test_a_model_of_full_size_on_512_ranks_is_explained_in_seconds_and_readable(coverage):
    source, target = preset_manifests("DeepSeek-V3", source="pp16 ep16", target="tp32 dp8")
    topology = Topology.of([range(first, first + 8) for first in range(0, 512, 8)], nics="rank")
    settings = RefitSettings(coverage=coverage, bucket_bytes=16 << 20, staging_bytes=512 << 20)
    began = time.process_time()
    found = explain(RefitPlan(Job(source, target, topology, settings)))
    lines = list(render_explained(Explained(found, topology, "auto", ())))
    assert time.process_time() - began < 20
    assert len(lines) < 150
    text = "\n".join(lines)
    assert (
        "model.layers.{3-60}.mlp.experts.down_proj.weight  [256, 7168, 2048] bfloat16, 58 tensors of 7.516 GB" in text
    )
    assert "  from ranks 16-255 (16 for each tensor) to ranks 256-511, 512 boxes each" in text
    experts = next(group for group in found if group.names[0] == "model.layers.3.mlp.experts.up_proj.weight")
    part = next(part for part in experts.parts if part.holders == (21,) and 256 + 3 in part.wanters)
    # Eight replicas, 32 ranks apart, have the same 64 of 2048 rows.
    assert part.wanters == tuple(range(259, 512, 32))
    assert [str(box) for box in part.boxes] == ["[80:96, 192:256, 0:7168]"]
