"""Checkpoints made by `save_tiny_model` are ordinary ones: Transformers loads every tensor of them."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from refit_transport.config.tiny_models import TINY_MODELS, tiny_config
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.testing.models import save_tiny_model


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_transformers_loads_every_tensor(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model(tmp_path / kind, kind=kind, seed=3, vocab_size=250)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    saved = load_file(folder / "model.safetensors")
    if kind != "gemma":
        assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])
        assert saved["lm_head.weight"].shape == (250, TINY_MODELS[kind].config["hidden_size"])
    config = json.loads((folder / "config.json").read_text())
    # What the package plans from is what was saved, and every value is random.
    planned = LogicalModel.from_config(tiny_config(kind, {"vocab_size": 250}))
    assert planned == LogicalModel.from_config(config)
    assert sum(tensor.numel for tensor in planned.main) == sum(tensor.numel() for tensor in saved.values())
    assert all(tensor.unique().numel() > 1 for tensor in saved.values() if tensor.numel() > 1)
    if kind == "moe":
        assert saved["model.layers.1.mlp.experts.7.up_proj.weight"].shape == (64, 64)


def test_seeds_decide_the_weights(tmp_path):
    first, same, other = (
        load_file(save_tiny_model(tmp_path / name, kind="dense", seed=seed) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_tied_embeddings_are_saved_once_and_dtypes_hold(tmp_path):
    folder = save_tiny_model(tmp_path / "tied", kind="dense", tie_word_embeddings=True, dtype="bfloat16")
    saved = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
