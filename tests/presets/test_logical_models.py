"""Tensors, shapes and roles of every architecture, against transformers and against published counts."""

from __future__ import annotations

import re

import pytest
from small_models import SMALL

from refit_transport.errors import ConfigError
from refit_transport.layout.presets.families import FAMILIES
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.simulation.catalog import catalog_entry, find_model, model_names

# FFN projections (no shared experts) over the model without drafter and vision tower, as enumerated from checkpoints.
FFN_SHARE = {
    "Qwen3-4B": 0.66864,
    "Qwen3-8B": 0.66365,
    "Qwen3-32B": 0.76814,
    "Qwen3-30B-A3B": 0.94953,
    "Qwen3-235B-A22B": 0.96598,
    "Qwen3.5-397B-A17B": 0.97528,
    "Qwen3-Next-80B-A3B": 0.97032,
    "DeepSeek-V2": 0.94555,
    "DeepSeek-V3": 0.97626,
    "Kimi-K2": 0.98897,
    "Llama-3.1-8B": 0.70199,
    "Llama-3.1-70B": 0.79899,
    "Mixtral-8x7B": 0.96562,
    "GLM-4.5": 0.95389,
    "gpt-oss-20b": 0.91404,
    "gpt-oss-120b": 0.98179,
    "NemotronH-8B": 0.5219,
    "NemotronH-47B": 0.51632,
    "Nemotron-3-Nano-30B-A3B": 0.93023,
    "Nemotron-3-Super-120B-A12B": 0.93432,
    "Nemotron-3-Ultra-550B-A55B": 0.93826,
    "Moonlight-16B-A3B": 0.90626,
    "Gemma-3-27B": 0.79612,
}
STAND_INS = {"Kimi-K3-2.8T", "Qwen3.8-2.4T-A95B"}


def test_every_model_that_ships_is_checked():
    assert set(model_names()) == FFN_SHARE.keys() | STAND_INS
    assert {name for name in model_names() if find_model(name).stand_in} == STAND_INS


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name):
    total = sum(tensor.numel for tensor in find_model(name).model.tensors)
    assert total == pytest.approx(catalog_entry(name)["parameters"], rel=0.01)


@pytest.mark.parametrize("name", FFN_SHARE)
def test_the_share_of_ffn_projections(name):
    count = find_model(name).model.parameters()
    share = (count["ffn"] + count["expert_ffn"]) / sum(count.values())
    assert share == pytest.approx(FFN_SHARE[name], abs=6e-6)


def test_every_architecture_has_a_small_model():
    assert {config["architectures"][0] for config in SMALL.values()} == FAMILIES.keys()


@pytest.mark.parametrize("kind", SMALL)
def test_names_and_shapes_are_transformers_own(kind):
    model = LogicalModel.from_config(SMALL[kind])
    names = [tensor.name for tensor in model.tensors]
    assert len(names) == len(set(names))
    stored = {tensor.name: _stored(tensor) for tensor in model.tensors if tensor.part != "drafter"}
    assert stored == _in_transformers(kind)


def _stored(tensor):
    """The shape in a checkpoint, with experts stacked: fields in turn are one dim there."""
    return (*tensor.shape[:-2], tensor.shape[-2] * 2) if tensor.row.in_turn else tensor.shape


def _in_transformers(kind):
    """The state of transformers' own model on meta, under checkpoint names and with experts stacked per projection."""
    import torch
    import transformers

    config = {key: value for key, value in SMALL[kind].items() if key != "architectures"}
    architecture = getattr(transformers, SMALL[kind]["architectures"][0])
    tied = config.get("tie_word_embeddings") or kind.startswith("gemma")
    with torch.device("meta"):
        state = architecture(architecture.config_class(**config)).state_dict()
    found = {}
    for name, value in state.items():
        shape = tuple(value.shape)
        if name == "lm_head.weight" and tied:
            continue
        for pattern, replacement in _RENAMED.get(kind, ()):
            name = re.sub(pattern, replacement, name)
        if name.endswith("experts.gate_up_proj") and kind not in ("qwen3.5 moe", "gpt-oss"):
            count, rows, inner = shape
            gate, up = ("w1", "w3") if kind == "mixtral" else ("gate_proj", "up_proj")
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}{each}.weight": (count, rows // 2, inner) for each in (gate, up)}
        elif re.search(r"experts\.(up|down)_proj$", name) and kind not in ("qwen3.5 moe", "gpt-oss"):
            found[f"{name.replace('down_proj', 'w2') if kind == 'mixtral' else name}.weight"] = shape
        else:
            found[name] = shape
    return found


_NEMOTRON = (("^model[.]", "backbone."),)
_RENAMED = {
    "mixtral": (("[.]mlp[.]", ".block_sparse_moe."),),
    "nemotron dense": _NEMOTRON,
    "nemotron moe": _NEMOTRON,
    "gemma": (
        ("^model[.]language_model[.]", "language_model.model."),
        ("^model[.]vision_tower[.]", "vision_tower.vision_model."),
        ("^model[.]multi", "multi"),
    ),
}


def test_transformers_5_spells_some_keys_in_another_way():
    old = SMALL["nemotron moe"]
    new = {key: value for key, value in old.items() if key != "hybrid_override_pattern"}
    new["layers_block_type"] = ["linear_attention", "moe", "mamba", "full_attention"]
    assert LogicalModel.from_config(new) == LogicalModel.from_config(old)
    moe = SMALL["qwen3 moe"]
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in moe.items()}
    assert LogicalModel.from_config(renamed) == LogicalModel.from_config(moe)


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        ("deepseek", "kv_lora_rank", "kv_lora_rank: must be a whole number, at least 1 .got nothing"),
        ("qwen3.5 moe", "text_config", "hidden_size: must be a whole number"),
        ("nemotron moe", "hybrid_override_pattern", "hybrid_override_pattern: must be a pattern"),
    ],
)
def test_a_missing_size_is_named(kind, key, message):
    config = {name: value for name, value in SMALL[kind].items() if name != key}
    with pytest.raises(ConfigError, match=message):
        LogicalModel.from_config(config)


def test_mxfp4_checkpoints_are_refused():
    quantized = SMALL["gpt-oss"] | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match="quantization_config: must not be there: MXFP4 weights can't be refitted"):
        LogicalModel.from_config(quantized)


def test_an_unknown_architecture_gets_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean DeepseekV3ForCausalLM"):
        LogicalModel.from_config({"architectures": ["DeepseekV4ForCausalLM"]})
