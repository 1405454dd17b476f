"""Log-probabilities of vLLM engines of many architectures after refits; see `vllm_engine_refits.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_pool import free_port
from rank_scripts import run_ranks

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("vllm_engine_refits.py")
# Each has something that Qwen's engines haven't: latent attention, Mamba, a gated delta net, attention sinks.
KINDS = ("deepseek", "nemotron dense")
MORE = (
    "glm with a drafter",
    *("qwen3 next", "gpt-oss", "llama", "qwen2 tied", "glm", "mixtral"),
    *("gemma text", "gemma 2", "deepseek v2", "deepseek without q lora"),
)


def _assert_parity(folder, kinds, *, plain, world_size=1):
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


def test_refitted_engines_say_what_fresh_ones_say(tmp_path):
    _assert_parity(tmp_path, KINDS, plain="1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "plain", "world_size"),
    [(MORE, "1", 1), (KINDS, "0", 1), (MORE, "0", 1), ((*KINDS, *MORE[:2]), "1", 2)],
    ids=["more", "stock kernels", "more with stock kernels", "two ranks"],
)
def test_more_refitted_engines_say_what_fresh_ones_say(tmp_path, kinds, plain, world_size):
    _assert_parity(tmp_path, kinds, plain=plain, world_size=world_size)
