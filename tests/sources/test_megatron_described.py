"""How Megatron describes stored experts, drafters and rare layouts, and what it means: real modules on real ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from megatron_checks import assemble
from megatron_described import MOE, described, drafting, grouped, hiding, stacked
from megatron_ranks import Snapshot
from preset_checks import contents
from rank_pool import RankPool
from small_models import SMALL

from refit_transport.errors import LayoutError
from refit_transport.layout.manifest import Manifest, RankManifest
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import source_manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.naming import check_complete

CUTS = [MegatronParallelism(expert=2), MegatronParallelism(expert_tensor=2)]
STEM = "model.layers.0.mlp.experts."


def _joined(outcomes: list[dict[str, object]]) -> dict[str, np.ndarray]:
    snapshots = [Snapshot(o["manifest"], o["pieces"], {}, 0.0) for o in outcomes]  # type: ignore[arg-type]
    return assemble(snapshots, Manifest.of(snapshot.manifest for snapshot in snapshots))


@pytest.mark.e2e
@pytest.mark.parametrize("cut", CUTS, ids=["ep2", "etp2"])
def test_stacked_experts_are_transposed_views(two_ranks: RankPool, cut: MegatronParallelism) -> None:
    outcomes = two_ranks.run(stacked, cut=cut)
    found = _joined(outcomes)
    count, width = 4 // cut.expert, 6 // cut.experts_over
    for rank, outcome in enumerate(outcomes):
        # `weight1` is viewed as [experts, inputs, gate | up], `weight2` as [experts, width, outputs].
        up, down = (
            weight.reshape(count, *shape) for weight, shape in zip(outcome["weights"], ((8, -1), (-1, 8)), strict=True)
        )
        first, start = (rank * count, 0) if cut.expert > 1 else (0, rank * width)
        for expert in range(count):
            rows, name = slice(start, start + width), f"{STEM}{first + expert}"
            assert np.array_equal(found[f"{name}.gate_proj.weight"][rows], up[expert, :, :width].T)
            assert np.array_equal(found[f"{name}.up_proj.weight"][rows], up[expert, :, width:].T)
            assert np.array_equal(found[f"{name}.down_proj.weight"][:, rows], down[expert].T)
        assert outcome["followed"] == -1


@pytest.mark.e2e
@pytest.mark.parametrize("cut", CUTS, ids=["ep2", "etp2"])
def test_a_parameter_per_expert(two_ranks: RankPool, cut: MegatronParallelism) -> None:
    outcomes = two_ranks.run(grouped, cut=cut)
    found = _joined(outcomes)
    count, width = 4 // cut.expert, 6 // cut.experts_over
    for rank, outcome in enumerate(outcomes):
        first, start = (rank * count, 0) if cut.expert > 1 else (0, rank * width)
        for expert in range(count):
            rows, name = slice(start, start + width), f"{STEM}{first + expert}"
            fc1, fc2 = (outcome["weights"][f"linear_fc{n}.weight{expert}"] for n in (1, 2))
            assert np.array_equal(found[f"{name}.gate_proj.weight"][rows], fc1[:width])
            assert np.array_equal(found[f"{name}.up_proj.weight"][rows], fc1[width:])
            assert np.array_equal(found[f"{name}.down_proj.weight"][:, rows], fc2)
    assert len(found) == 3 * MOE["num_experts"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one by one", ""),
        ("one by one, down", r"linear_fc2.weight: rank {}: .*flagged as tensor-parallel in dim 1 \(local 256 of 512\)"),
        ("grouped, up", r"linear_fc1.weight: rank {}: .*\[4, 1024, 8\].*model config.*got \[4, 512, 8\]"),
        ("grouped, down", r"linear_fc2.weight: rank {}: .*\[4, 8, 512\].*model config.*got \[4, 8, 256\]"),
    ],
)
def test_a_shard_that_does_not_show_that_it_is_one_is_refused(two_ranks: RankPool, kind: str, message: str) -> None:
    """Experts of 512 columns over two ranks: of Megatron's flags, or as a description says it where one is missing."""
    for rank, found in enumerate(two_ranks.run(hiding, kind=kind)):
        assert re.search(message.format(rank), found), found
        assert bool(found) is bool(message)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "cut", [MegatronParallelism(2, sequence_parallel=False), MegatronParallelism(pipeline=2)], ids=["tp2", "pp2"]
)
def test_a_drafter_is_described_whole(two_ranks: RankPool, cut: MegatronParallelism) -> None:
    outcomes = two_ranks.run(drafting, cut=cut)
    model = LogicalModel.from_config(SMALL["glm"] | {"num_nextn_predict_layers": 1})
    manifest = Manifest.of(outcome["manifest"] for outcome in outcomes)
    check_complete(manifest, model)
    assert {spec.name: spec.shape for spec in manifest.tensors} == {t.name: t.shape for t in model.tensors}
    found = _joined(outcomes)
    assert np.array_equal(found["model.layers.4.embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert np.array_equal(found["model.layers.4.shared_head.head.weight"], found["lm_head.weight"])
    assert any(name.startswith("mtp.layers.0.transformer_layer.") for name in outcomes[-1]["names"])
    lost = tuple(spec for spec in manifest.tensors if spec.name != "model.layers.4.eh_proj.weight")
    with pytest.raises(LayoutError, match=r"model\.layers\.4\.eh_proj\.weight: expected a rank that holds it"):
        check_complete(Manifest.of([RankManifest(0, "source", lost, ())]), model)
    main = tuple(spec for spec in manifest.tensors if not spec.name.startswith("model.layers.4."))
    check_complete(Manifest.of([RankManifest(0, "source", main, ())]), model)


@pytest.mark.e2e
def test_stages_may_be_given_layer_by_layer(two_ranks: RankPool) -> None:
    """Chunks of 0, 3, 1 and 0 layers: the embedding and the head have stages of their own."""
    stages = [["embedding"], ["decoder"] * 3, ["decoder"], ["loss"]]
    cut = MegatronParallelism(pipeline=2, virtual_pipeline=2)
    outcomes = two_ranks.run(described, config=SMALL["llama"], cut=cut, stages=stages)
    model = LogicalModel.from_config(SMALL["llama"])
    manifest = Manifest.of(outcome["manifest"] for outcome in outcomes)
    check_complete(manifest, model)
    held = [{model_layer(spec.name) for spec in ranked.tensors} for ranked in manifest.ranks]
    assert held == [{"model.embed_tokens.weight", 3}, {0, 1, 2, "model.norm.weight", "lm_head.weight"}]


def model_layer(name: str) -> int | str:
    return int(name.split(".")[2]) if ".layers." in name else name


@pytest.mark.e2e
def test_context_parallel_ranks_are_replicas(four_ranks: RankPool) -> None:
    outcomes = four_ranks.run(described, config=SMALL["llama"], cut=MegatronParallelism(2), context=2)
    manifest = Manifest.of(outcome["manifest"] for outcome in outcomes)
    preset = source_manifest(
        LogicalModel.from_config(SMALL["llama"]),
        MegatronParallelism(2),
        world_size=4,
        dtype="float32",
        make_vocab_size_divisible_by=128,
    )
    assert contents(manifest) == contents(preset)
    assert manifest.ranks[0].pieces == manifest.ranks[2].pieces != manifest.ranks[1].pieces
