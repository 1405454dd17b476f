"""transformers' modules as sources, plain and sharded by FSDP2, against checkpoints that transformers itself writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dtensor_ranks import fully_sharded
from megatron_checks import assemble, assert_same
from megatron_models import checkpoint_tensors, load_model, make_checkpoint
from megatron_ranks import Snapshot
from rank_pool import RankPool

from refit_transport.config.checkpoint_config import read_config
from refit_transport.errors import LayoutError
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.dtensor import source_of

KINDS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm", "gpt_oss", "qwen3_next",
    "nemotron", "nemotron_moe",
)  # fmt: skip


def written(folder: Path, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The checkpoint tensors that transformers writes for a model with these weights."""
    model = load_model(folder)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    model.save_pretrained(folder / "again")
    return {name: value.numpy() for name, value in checkpoint_tensors(folder / "again").items()}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_module_holds_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, kind=kind, num_hidden_layers=3, vocab_size=151)
    module = load_model(folder)
    source = source_of(module.state_dict, model=LogicalModel.from_config(read_config(folder)))
    manifest, buffers = source.manifest(0), source.buffers()
    pieces = [buffers[p.buffer].as_strided(p.box.shape, p.strides, p.offset).numpy() for p in manifest.pieces]
    found = assemble([Snapshot(manifest, pieces, {}, 0.0)], Manifest.of([manifest]))
    assert_same(found, {name: value.numpy() for name, value in checkpoint_tensors(folder).items()})


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.nightly if kind not in ("qwen3_moe", "gpt_oss") else ()) for kind in KINDS],
)
def test_shards_of_fsdp2_are_boxes_of_the_checkpoint(kind: str, tmp_path: Path, four_ranks: RankPool) -> None:
    # Four ranks divide neither the vocabulary nor six experts.
    six = {"num_local_experts": 6} if kind == "gpt_oss" else {}
    folder = make_checkpoint(tmp_path, kind=kind, num_hidden_layers=3, vocab_size=151, **six)
    outcomes = four_ranks.run(fully_sharded, folder=folder)
    assert all(outcome["unchanged"] for outcome in outcomes)
    snapshots = [Snapshot(outcome["manifest"], outcome["pieces"], {}, 0.0) for outcome in outcomes]
    found = assemble(snapshots, Manifest.of(snapshot.manifest for snapshot in snapshots))
    before = {name: value.numpy() for name, value in checkpoint_tensors(folder).items()}
    assert any(not np.array_equal(found[name], value) for name, value in before.items())
    assert_same(found, written(folder, outcomes[0]["whole"]))
    # Every rank has its own part and no other's.
    whole = sum(value.size for value in before.values())
    assert max(sum(piece.size for piece in outcome["pieces"]) for outcome in outcomes) < 0.5 * whole


def test_tied_heads_are_sent_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    module = load_model(folder)
    state = module.state_dict()
    assert "lm_head.weight" in state
    model = LogicalModel.from_config(read_config(folder))
    assert "lm_head.weight" not in {spec.name for spec in source_of(state, model=model).manifest(0).tensors}
    with pytest.raises(LayoutError, match=r"lm_head\.weight: rank 3: expected a tensor of Qwen3ForCausalLM"):
        source_of(state | {"lm_head.weight": state["lm_head.weight"] + 1}, model=model).manifest(3)


def test_what_the_outline_does_not_have_or_have_so_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, kind="qwen3_moe")
    state, model = load_model(folder).state_dict(), LogicalModel.from_config(read_config(folder))
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(LayoutError, match=r"adapter: rank 2: expected a tensor of Qwen3MoeForCausalLM"):
        source_of(state | {"adapter": torch.zeros(2)}, model=model).manifest(2)
    with pytest.raises(LayoutError, match=r"gate_up_proj: .*\[8, 96, 64\] \(model config\), got \[8, 95, 64\]"):
        source_of(state | {stack: state[stack][:, 1:]}, model=model).manifest(0)
    del state[stack]
    with pytest.raises(LayoutError, match=r"gate_up_proj: rank 1: expected an entry of the module's state dict"):
        source_of(state, model=model).manifest(1)
