"""Log-probabilities of vLLM engines of many architectures after refits; see `vllm_engine_refits.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import free_port
from rank_scripts import run_ranks
from support_names import vllm_rows
from support_records import listed

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

PROOF = "tokens and log-probabilities of a fresh engine, A-B-A-B"
SCRIPT = Path(__file__).with_name("vllm_engine_refits.py")
# Each has something that Qwen's engines haven't: latent attention, Mamba, a gated delta net, attention sinks.
KINDS = ("deepseek", "nemotron dense")
MORE = (
    "glm with a drafter",
    *("qwen3 next", "gpt-oss", "llama", "qwen2 tied", "glm", "mixtral"),
    *("gemma text", "gemma 2", "deepseek v2", "deepseek without q lora"),
)


def _share_at_parity(folder, kinds, *, plain, world_size=1):
    """The smallest shard-to-shard share of these kinds, all of which say what fresh engines say."""
    shares = []
    ports = ",".join(str(free_port()) for _ in kinds)
    environment = {"CHANNEL_PORTS": ports, "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": plain}
    environment["VLLM_DIST_IDENT"] = "refits"
    for results in run_ranks(SCRIPT, folder, kinds, world_size=world_size, environment=environment):
        assert list(results) == list(kinds)
        for kind, found in results.items():
            assert found["differ"]
            if kind.endswith(" with a drafter"):
                assert found["tensors of the drafter that differ"] > 10
                assert [found[f"{version}: differs from a fresh {n}"] for version, n in enumerate("bab")] == [[]] * 3
            assert [found[f"{version}: says what a fresh {name} says"] for version, name in enumerate("bab")] == [
                True
            ] * 3
        shares += [found["shard to shard"] for found in results.values()]
    return min(shares)


@listed(*vllm_rows(KINDS, ranks=1))
def test_refitted_engines_say_what_fresh_ones_say(tmp_path, support_record):
    support_record(shard_to_shard=_share_at_parity(tmp_path, KINDS, plain="1"), proof=PROOF)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "plain", "ranks"),
    [
        pytest.param(kinds, plain, ranks, id=name, marks=vllm_rows(kinds, ranks=ranks, plain=plain))
        for name, kinds, plain, ranks in (
            ("more", MORE, "1", 1),
            ("stock kernels", KINDS, "0", 1),
            ("more with stock kernels", MORE, "0", 1),
            ("two ranks", (*KINDS, *MORE[:2]), "1", 2),
        )
    ],
)
def test_more_refitted_engines_say_what_fresh_ones_say(tmp_path, kinds, plain, ranks, support_record):
    share = _share_at_parity(tmp_path, kinds, plain=plain, world_size=ranks)
    support_record(shard_to_shard=share, proof=PROOF)
