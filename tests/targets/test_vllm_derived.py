"""What vLLM derives from weights, holds twice and keeps at fixed addresses follows; see `vllm_derived.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import free_port
from rank_scripts import run_ranks

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_derived.py")
# What changes alone, and what follows it; which names share memory; which addresses graphs hold.
DERIVED = {"deepseek": ["W_UK_T", "W_UV"], "nemotron dense": ["A"], "qwen2 tied": []}
SHARED = {
    "deepseek": ["e_score_correction_bias", "e_score_correction_bias"],
    "nemotron dense": ["weight", "conv_weights"],
    "qwen2 tied": ["weight", "weight"],
}
HELD = {
    "deepseek": {"weight", "w13_weight", "w2_weight", "W_UK_T", "W_UV", "e_score_correction_bias"},
    "nemotron dense": {"weight", "A", "D", "conv_weights"},
    "qwen2 tied": {"weight", "bias"},
}
KINDS = tuple(DERIVED)


@pytest.fixture(scope="module")
def refitted(tmp_path_factory):
    environment = {
        "CHANNEL_PORTS": ",".join(str(free_port()) for _ in 2 * KINDS),
        "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1",
        "VLLM_DIST_IDENT": "derived",
    }
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("derived"), KINDS, world_size=2, environment=environment)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_follows_from_the_tensors_that_change_is_another(refitted, kind):
    for found in (rank[kind] for rank in refitted):
        changes = {name: differing for name, differing in found.items() if name.startswith("only ")}
        # In one bucket and in ten; of DeepSeek also a buffer alone.
        assert len(changes) == (4 if kind == "deepseek" else 2)
        assert set(map(tuple, changes.values())) == {()}
        assert [found[f"compared, {label}"] for label in ("in one bucket", "in ten")] == [0, 0]


def test_absorbed_projections_came_in_one_bucket_and_in_ten(refitted):
    counts = refitted[0]["deepseek"]["payloads"]
    assert counts["kv_b_proj, in one bucket"] == {"0": 1, "1": 1}
    assert counts["kv_b_proj, in ten"].keys() == {"0", "1"}
    assert min(counts["kv_b_proj, in ten"].values()) >= 10


@pytest.mark.parametrize("kind", KINDS)
def test_aliases_stay_shared_and_addresses_that_graphs_hold_stay(refitted, kind):
    for found in (rank[kind] for rank in refitted):
        assert SHARED[kind] in found["aliases"]
        assert found["aliases later"] == found["aliases"]
        assert set(found["addresses"]) >= HELD[kind]
        assert [found[f"moved, {label}"] for label in ("in one bucket", "in ten")] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_derived_is_compared_and_named_where_it_does_not_follow(refitted, kind):
    found = [rank[kind] for rank in refitted]
    assert [rank["derived"] for rank in found] == [DERIVED[kind]] * 2
    spoilt = found[0]["found after a change"]
    # Each rank has changed its own, and learns of the other's.
    assert found[1]["found after a change"] == spoilt == {name: [name, name] for name in spoilt}
    assert {name.rsplit(".", 1)[1] for name in spoilt} == set(DERIVED[kind])
