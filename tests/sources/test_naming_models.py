"""The naming table on every architecture, small and at full size: nothing unexplained, nothing left out, both ways."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from small_models import SMALL

from refit_transport.layout.box import Box
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor
from refit_transport.simulation.catalog import find_model, model_names
from refit_transport.sources.naming import Naming, Shard

# Megatron-core has no multi-token prediction in its Mamba models, and none of Qwen's beyond one layer.
_WITHOUT_DRAFTER = ("NemotronHForCausalLM",)


def _described(model: LogicalModel) -> list[LogicalTensor]:
    parts = ("main",) if model.architecture in _WITHOUT_DRAFTER else ("main", "drafter")
    return [tensor for tensor in model.tensors if tensor.part in parts]


def _parameters(naming: Naming, model: LogicalModel) -> Iterator[Shard]:
    """Every Megatron parameter of the model, whole, once: found from the tensors that lie in it."""
    seen = set()
    for tensor in _described(model):
        for home in naming.homes(tensor.name):
            key = home.key
            if home.layer >= 0:
                prefix = "decoder.layers." if key.startswith("decoder.") else "mtp.layers."
                key = f"{prefix}{home.layer}.{key.removeprefix(prefix)}" if key.startswith(prefix) else key
            if key in seen:
                continue
            seen.add(key)
            shape = naming.shape(key)
            yield Shard(key, shape, Box.full(shape))


@pytest.mark.parametrize("kind", SMALL)
def test_every_element_is_in_one_parameter(kind: str) -> None:
    model = LogicalModel.from_config(SMALL[kind])
    naming = Naming(model)
    seen = {tensor.name: np.zeros(tensor.shape, int) for tensor in _described(model)}
    for shard in _parameters(naming, model):
        local = np.zeros(shard.global_shape, int)
        for placed in naming.place(shard, drafts=True):
            seen[placed.tensor][tuple(slice(span.start, span.stop) for span in placed.box.spans)] += 1
            local[tuple(slice(span.start, span.stop) for span in placed.local.spans)] += 1
        copies = len(naming.place(shard, drafts=True)) // len(naming.place(shard))
        assert (local == copies).all(), shard.key
    for name, count in seen.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize("name", model_names())
def test_full_size_models_have_no_unexplained_tensor(name: str) -> None:
    """True names and shapes: the parameters' elements are those of the model, and each tensor has a parameter."""
    model = find_model(name).model
    naming = Naming(model)
    held: dict[str, int] = {}
    for shard in _parameters(naming, model):
        if shard.global_shape[0] > 1 and ".experts." in shard.key:
            # One expert stands for all.
            shard = Shard(shard.key, shard.global_shape, Box.full((1, *shard.global_shape[1:])))
        for placed in naming.place(shard, drafts=True):
            share = placed.shape[0] if ".experts." in shard.key else 1
            held[placed.tensor] = held.get(placed.tensor, 0) + placed.box.numel * share
    assert held == {tensor.name: tensor.numel for tensor in _described(model)}


SPELT = {
    "llama": {
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "model.layers.1.input_layernorm.weight",
        "decoder.layers.1.input_layernorm.weight": "model.layers.1.input_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": "model.layers.1.post_attention_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "model.layers.1.post_attention_layernorm.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    },
    "deepseek": {
        "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight": (
            "model.layers.1.self_attn.q_a_layernorm.weight"
        ),
        "decoder.layers.1.self_attention.q_layernorm.weight": "model.layers.1.self_attn.q_a_layernorm.weight",
        "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight": (
            "model.layers.1.self_attn.kv_a_layernorm.weight"
        ),
        "decoder.layers.1.self_attention.kv_layernorm.weight": "model.layers.1.self_attn.kv_a_layernorm.weight",
        "decoder.layers.1.mlp.router.expert_bias": "model.layers.1.mlp.gate.e_score_correction_bias",
        "mtp.layers.0.enorm.weight": "model.layers.4.enorm.weight",
        "mtp.layers.0.hnorm.weight": "model.layers.4.hnorm.weight",
        "mtp.layers.0.eh_proj.weight": "model.layers.4.eh_proj.weight",
        "mtp.layers.0.final_layernorm.weight": "model.layers.4.shared_head.norm.weight",
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight": "model.layers.4.post_attention_layernorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": "model.layers.4.self_attn.o_proj.weight",
    },
    "nemotron moe": {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight": "backbone.layers.0.norm.weight",
        "decoder.layers.0.norm.weight": "backbone.layers.0.norm.weight",
        "decoder.layers.0.mixer.norm.weight": "backbone.layers.0.mixer.norm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "backbone.layers.1.norm.weight",
        "decoder.layers.1.mlp.router.expert_bias": "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": "backbone.layers.3.norm.weight",
        "decoder.layers.3.input_layernorm.weight": "backbone.layers.3.norm.weight",
        "decoder.final_norm.weight": "backbone.norm_f.weight",
    },
    "gemma text": {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "model.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.post_layernorm.weight": (
            "model.layers.0.post_attention_layernorm.weight"
        ),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "model.layers.0.pre_feedforward_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc2.post_layernorm.weight": "model.layers.0.post_feedforward_layernorm.weight",
    },
}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, names in SPELT.items() for key in names])
def test_keys_name_the_tensors_that_megatron_means(kind: str, key: str) -> None:
    """Written down from Megatron's modules and specs, and for Gemma from megatron-bridge."""
    config = SMALL[kind] | ({"num_nextn_predict_layers": 1} if kind == "deepseek" else {})
    naming = Naming(LogicalModel.from_config(config))
    shape = naming.shape(key)
    assert {placed.tensor for placed in naming.place(Shard(key, shape, Box.full(shape)))} == {SPELT[kind][key]}


def test_a_drafter_shares_the_embedding_and_the_head() -> None:
    model = LogicalModel.from_config(SMALL["deepseek"] | {"num_nextn_predict_layers": 2})
    naming = Naming(model)
    for key, names in (
        ("embedding.word_embeddings.weight", ("model.embed_tokens.weight", "{}.embed_tokens.weight")),
        ("output_layer.weight", ("lm_head.weight", "{}.shared_head.head.weight")),
    ):
        shard = Shard(key, (256, 32), Box.full((256, 32)))
        assert [placed.tensor for placed in naming.place(shard)] == [names[0]]
        found = [placed.tensor for placed in naming.place(shard, drafts=True)]
        assert found == [names[0], *(names[1].format(f"model.layers.{layer}") for layer in (4, 5))]
        (home,) = naming.homes(names[1].format("model.layers.5"))
        assert home.key == key
