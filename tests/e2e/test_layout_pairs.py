"""Every architecture from real Megatron ranks into real vLLM ranks, for layouts that cross every awkward border.

What a refit must make of a vLLM rank is what vLLM's own loader makes of the checkpoint; and that the Megatron ranks
hold that checkpoint, Hugging Face's log-probabilities say. See `pair_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from megatron_models import load_model, make_checkpoint, model_logprobs, sequences, small_config
from pair_ranks import Meeting, Served, serve, train
from preset_checks import regions
from rank_pool import Call, RankPool, free_port, run_together
from rank_scripts import VLLM
from small_models import vllm_sizes
from support_names import architecture, serving_layout, training_layout
from support_records import supports

from refit_transport.config.checkpoint_config import read_config
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.layout.presets.vllm import EngineParallelism as Engine
from refit_transport.layout.presets.vllm import target_manifest
from refit_transport.sources.naming import check_complete

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e
AS_LOADED = "every tensor bit-identical with a fresh vLLM, A-B-A-B"


@dataclass(frozen=True)
class Pair:
    kind: str
    train: Cut
    ranks: int
    serve: Engine
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    nightly: bool = True

    @property
    def marked(self) -> Any:
        row = {
            "architecture": architecture(self.kind, self.model),
            "source": training_layout(self.train, ranks=self.ranks),
            "target": serving_layout(self.serve),
        }
        marks = [supports(**row), *([pytest.mark.nightly] if self.nightly else [])]
        return pytest.param(self, id="{architecture}: {source} -> {target}".format(**row), marks=marks)


_PADDED = {"make_vocab_size_divisible_by": 16}
_TIED = {"tie_word_embeddings": True}
_YARN = {"factor": 1.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
_MIXED = Cut(2, expert=2, expert_tensor=1, sequence_parallel=True)
_FOUR = Cut(2, pipeline=2, expert=2, expert_tensor=1, sequence_parallel=True)
_UNEVEN = Cut(pipeline=2, last_stage_layers=2)


def _sparse(
    kind: str,
    experts: str,
    first: Engine,
    *,
    etp: bool = True,
    five: Mapping[str, Any] = MappingProxyType({"num_hidden_layers": 5}),
    four: Cut = _FOUR,
    heads: Mapping[str, Any] = MappingProxyType({}),
    spread: int = 4,
) -> list[Pair]:
    """One pair in CI, and the others at other awkward borders; `heads` where vLLM can't copy KV heads."""
    return [
        Pair(kind, _MIXED, 2, first, {"vocab_size": 151}, _PADDED, nightly=False),
        # Megatron has biases of experts only where ETP is 1.
        Pair(kind, Cut(expert_tensor=2), 2, Engine()) if etp else Pair(kind, Cut(expert=2), 2, Engine()),
        Pair(kind, _UNEVEN, 2, Engine(pipeline=2), dict(five)),
        Pair(kind, Cut(expert=3), 3, Engine(spread, expert=spread), {experts: 6, **heads}),
        Pair(kind, four, 4, Engine(4), {"vocab_size": 1003, **heads}, _PADDED | {"precision": "bfloat16"}),
    ]


PAIRS = (
    Pair("llama", Cut(4), 4, Engine(2), {"vocab_size": 151}, _PADDED, nightly=False),
    Pair(
        "llama",
        Cut(pipeline=4, virtual_pipeline=2, last_stage_layers=2),
        4,
        Engine(pipeline=2),
        {"num_hidden_layers": 14},
    ),
    Pair("llama", _UNEVEN, 2, Engine(pipeline=2), {"num_hidden_layers": 5} | _TIED),
    Pair("llama", Cut(2, sequence_parallel=True), 2, Engine(4), {"vocab_size": 1003}, _PADDED),
    Pair("llama", Cut(), 2, Engine(2, pipeline=2), {"num_key_value_heads": 1}, {"precision": "bfloat16"}),
    Pair("qwen2", _UNEVEN, 2, Engine(2), {"num_hidden_layers": 5} | _TIED, nightly=False),
    Pair("qwen2", Cut(4), 4, Engine(), {"vocab_size": 151}, _PADDED),
    Pair("qwen2", Cut(2, pipeline=2, virtual_pipeline=2), 4, Engine(4)),
    Pair("qwen2", Cut(2), 2, Engine(pipeline=2), {"vocab_size": 1003}, _PADDED),
    Pair("qwen3", Cut(2), 2, Engine(pipeline=2), _TIED, nightly=False),
    Pair("qwen3", Cut(4), 4, Engine(2), {"vocab_size": 1003}, _PADDED),
    Pair("qwen3", _UNEVEN, 2, Engine(4), {"num_hidden_layers": 5}),
    Pair("qwen3", Cut(2), 2, Engine(2, pipeline=2), {"num_key_value_heads": 1}),
    Pair("gemma", Cut(2, sequence_parallel=True), 2, Engine(2), {"vocab_size": 151}, _PADDED, nightly=False),
    Pair("gemma", _UNEVEN, 2, Engine(pipeline=2), {"num_hidden_layers": 5}),
    Pair("gemma", Cut(4), 4, Engine(2), {"vocab_size": 1003}, _PADDED),
    Pair("gemma", Cut(2), 2, Engine(2, pipeline=2), {"num_key_value_heads": 1}),
    Pair("qwen3_moe", Cut(2, sequence_parallel=True), 2, Engine(2, expert=2), {"num_experts": 7}, nightly=False),
    *_sparse("qwen3_moe", "num_experts", Engine(2))[1:],
    *_sparse("mixtral", "num_local_experts", Engine(2)),
    *_sparse("deepseek_v2", "n_routed_experts", Engine(pipeline=2)),
    *_sparse("deepseek_v3", "n_routed_experts", Engine(2, expert=2)),
    *_sparse("glm", "n_routed_experts", Engine(2, expert=2)),
    # vLLM loads its experts onto ranks that have equally many.
    *_sparse("gpt_oss", "num_local_experts", Engine(2), etp=False, heads={"num_key_value_heads": 4}, spread=2),
    *_sparse("qwen3_next", "num_experts", Engine(2)),
    # vLLM wants experts on each stage.
    *_sparse(
        "nemotron_moe",
        "n_routed_experts",
        Engine(2),
        five={"hybrid_override_pattern": "ME*EM"},
        four=replace(_FOUR, last_stage_layers=2),
    ),
    Pair("nemotron", Cut(2), 2, Engine(), nightly=False),
    Pair("nemotron", Cut(2), 2, Engine(4), {"vocab_size": 1003}, _PADDED),
    Pair("nemotron", Cut(4), 4, Engine(2), {"vocab_size": 151}, _PADDED),
    Pair("nemotron", Cut(pipeline=2, last_stage_layers=1), 2, Engine(pipeline=2)),
    Pair("nemotron", Cut(2, pipeline=2, sequence_parallel=True), 4, Engine(2, pipeline=2)),
)


@pytest.fixture(scope="module")
def vllm_ranks() -> Iterator[RankPool]:
    pool = RankPool(4, VLLM | {"REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1"})
    yield pool
    pool.close()


def _checkpoint(folder, pair, *, seed):
    """What both sides can build: sizes that vLLM's kernels take, and values that bfloat16 has."""
    config = small_config(pair.kind)
    unusual = vllm_sizes(config) | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0} | pair.model
    unusual["initializer_range"] = 0.05  # or sums over so many columns say little about single ones
    if pair.kind == "deepseek_v3":
        unusual["topk_method"] = "noaux_tc"  # or vLLM has no biases of its router
    if pair.kind == "gpt_oss":
        unusual["intermediate_size"] = 128  # each column of gate and up is a box
        # vLLM wants YaRN's numbers; Hugging Face and Megatron rotate plainly.
        unusual["rope_parameters"] = config["rope_parameters"] | _YARN
    return make_checkpoint(folder, kind=pair.kind, seed=seed, dtype="bfloat16", **unusual)


@pytest.mark.parametrize("pair", [pair.marked for pair in PAIRS])
def test_vllm_ranks_are_as_freshly_loaded(pair, tmp_path, request, vllm_ranks, support_record):
    trainers = request.getfixturevalue("two_ranks" if pair.ranks == 2 else "four_ranks")
    folders = {name: _checkpoint(tmp_path / name, pair, seed=seed) for seed, name in enumerate("ab")}
    logical = LogicalModel.from_config(read_config(folders["a"]))
    # In bfloat16 rounding decides which experts a token meets.
    exact = pair.options.get("precision", "float32") == "float32"
    prompts = sequences(vocab=logical.vocab, lengths=(12, 5, 9), seed=99) if exact else []
    common = {"meeting": Meeting(free_port(), pair.ranks, pair.serve.ranks), "folders": folders}

    sent, served = run_together(
        Call(trainers, train, common | {"cut": pair.train, "options": pair.options, "prompts": prompts}, pair.ranks),
        Call(vllm_ranks, serve, common | {"cut": pair.serve}, pair.serve.ranks),
        timeout_s=300.0,
    )

    source = Manifest.of(each.manifest for each in sent)
    check_complete(source, logical)
    assert (sent[0].whole, sent[0].unused, sent[0].unequal) == ([], (), 0)
    assert sent[0].shard_to_shard == 1
    for each in served:
        _assert_as_loaded(each)
    assert _vocabulary_tails(served) == _expected_tails(pair.serve, logical.vocab)
    preset = target_manifest(logical, pair.serve, first_rank=0)
    assert [regions(each.manifest) for each in served] == [regions(ranked) for ranked in preset.ranks]
    proof = AS_LOADED
    if exact:
        assert _largest(sent[0].logprobs, model_logprobs(load_model(folders["b"]), prompts)) <= 5e-5
        proof += "; trainer's log-probabilities are Hugging Face's"
    support_record(shard_to_shard=sent[0].shard_to_shard, proof=proof)


def _assert_as_loaded(served: Served) -> None:
    assert served.different_before > 5
    assert served.differing == [[], [], []]
    assert (served.private, served.moved, served.manifest.opaque) == ({}, [], ())
    assert [filled for _, filled in served.tails.values()] == [0] * len(served.tails)


def _vocabulary_tails(served: list[Served]) -> list[set[int]]:
    return [{length for length, _ in each.tails.values()} for each in served]


def _expected_tails(cut: Engine, vocab: int) -> list[set[int]]:
    """Rows behind the vocabulary on each rank: vLLM pads to multiples of 64. Inner stages have no vocabulary."""
    rows = -(-vocab // 64) * 64 // cut.tensor
    tails = [{min(rows, max(0, (rank + 1) * rows - vocab))} for rank in range(cut.tensor)]
    return tails * cut.pipeline


def _largest(one: list[list[float]], other: list[list[float]]) -> float:
    return max(abs(a - b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True))
