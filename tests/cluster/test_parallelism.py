"""Which models can be cut how, before any process starts; config and checkpoint errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_models import make_checkpoint
from small_models import qwen

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.perturbation import element_noise
from refit_transport.cluster.training import TrainingWorker
from refit_transport.config.checkpoint_config import read_config
from refit_transport.errors import ConfigError, LayoutError
from refit_transport.layout.manifest import TensorSpec
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.megatron import training_misfits
from refit_transport.layout.presets.model import LogicalModel

DENSE = qwen()
MOE = qwen(experts=8)


@pytest.mark.parametrize(
    ("model", "cut", "world_size"),
    [
        (DENSE, MegatronParallelism(), 1),
        (DENSE, MegatronParallelism(tensor=4, pipeline=2, virtual_pipeline=2), 16),
        (DENSE, MegatronParallelism(pipeline=2, last_stage_layers=1), 2),
        (qwen(layers=14), MegatronParallelism(pipeline=4, virtual_pipeline=2, last_stage_layers=2), 4),
        (MOE, MegatronParallelism(2, expert=2, expert_tensor=1, sequence_parallel=True), 2),
    ],
)
def test_layouts_that_fit(model: LogicalModel, cut: MegatronParallelism, world_size: int) -> None:
    assert training_misfits(model, cut, world_size=world_size) == ()


@pytest.mark.parametrize(
    ("model", "cut", "world_size", "words"),
    [
        (DENSE, MegatronParallelism(tensor=3), 3, "4 attention heads"),
        (qwen(heads=12, kv_heads=2), MegatronParallelism(tensor=3), 3, "2 key-value heads"),
        (qwen(intermediate=97), MegatronParallelism(tensor=2), 2, "FFN width 97"),
        (DENSE, MegatronParallelism(tensor=2), 3, "tensor x pipeline 2 must divide the 3 training ranks"),
        (DENSE, MegatronParallelism(pipeline=3), 3, "3 stages that must divide the model's 4 layers"),
        (DENSE, MegatronParallelism(pipeline=2, virtual_pipeline=4), 2, "4 must divide the 2 layers of a stage"),
        (
            DENSE,
            MegatronParallelism(pipeline=2, first_stage_layers=1, last_stage_layers=1),
            2,
            "layers without a stage: first and last take 2 of 4",
        ),
        (
            DENSE,
            MegatronParallelism(pipeline=2, first_stage_layers=3, last_stage_layers=2),
            2,
            "stages without layers: the model has 4",
        ),
        (DENSE, MegatronParallelism(pipeline=3, first_stage_layers=4), 3, "stages without layers"),
        (DENSE, MegatronParallelism(pipeline=5), 5, "stages without layers"),
        (
            DENSE,
            MegatronParallelism(pipeline=2, virtual_pipeline=2, first_stage_layers=3, last_stage_layers=1),
            2,
            "2 must divide the 1 layers of the last stage",
        ),
        (
            DENSE,
            MegatronParallelism(pipeline=3, first_stage_layers=1),
            3,
            "2 stages that must divide the 3 layers of the other stages",
        ),
        (DENSE, MegatronParallelism(tensor=2, pipeline=2), 2, "tensor x pipeline 4 must divide the 2 training ranks"),
        (
            MOE,
            MegatronParallelism(expert=2, pipeline=2),
            2,
            "2 times expert tensor x pipeline = 1 x 2 must divide the 2 training ranks",
        ),
        (DENSE, MegatronParallelism(first_stage_layers=2), 1, "pipeline parallel size above 1"),
        (
            qwen(experts=8, shared=47),
            MegatronParallelism(2, sequence_parallel=True),
            2,
            "shared experts' width 47",
        ),
        (DENSE, MegatronParallelism(virtual_pipeline=2), 1, "pipeline parallel size above 1"),
        (DENSE, MegatronParallelism(expert=2), 2, "no experts"),
        (DENSE, MegatronParallelism(sequence_parallel=True), 1, "tensor parallel size above 1"),
        (MOE, MegatronParallelism(expert=3), 3, "8 experts"),
        (MOE, MegatronParallelism(tensor=2), 2, "sequence parallelism"),
        (
            MOE,
            MegatronParallelism(expert=4),
            2,
            "4 times expert tensor x pipeline = 1 x 1 must divide the 2 training ranks",
        ),
        (qwen(experts=8, moe_intermediate=47), MegatronParallelism(2, sequence_parallel=True), 2, "experts' width 47"),
        (DENSE, MegatronParallelism(tensor=0), 1, "at least 1"),
    ],
)
def test_each_misfit_is_named(model: LogicalModel, cut: MegatronParallelism, world_size: int, words: str) -> None:
    reasons = training_misfits(model, cut, world_size=world_size)
    assert any(words in str(reason) for reason in reasons), reasons


def test_uneven_interleaved_stages_number_every_layer_once() -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=14,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        num_layers_in_last_pipeline_stage=2,
    )
    layers = [
        get_transformer_layer_offset(config, chunk, stage) + local
        for chunk in range(2)
        for stage in range(4)
        for local in range(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))
    ]
    assert layers == list(range(14))


def _worker(folder: Path, cut: MegatronParallelism) -> TrainingWorker:
    return TrainingWorker(
        rank=0,
        world_size=3,
        init_method="tcp://127.0.0.1:1",
        checkpoint=str(folder),
        parallelism=cut,
        timeout_s=5,
    )


def test_a_worker_refuses_before_it_joins_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        _worker(tmp_path, MegatronParallelism())
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="tensor parallel size: must divide the model's 4 attention heads"):
        _worker(tmp_path, MegatronParallelism(tensor=3))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT9ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"supported: LlamaForCausalLM.*Qwen2ForCausalLM.*GPT9ForCausalLM"):
        _worker(tmp_path, MegatronParallelism())


def test_shapes_of_both_config_spellings() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "vocab_size": 251,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "mlp_only_layers": [5],
        "decoder_sparse_step": 2,
    }
    model = LogicalModel.from_config(config)
    assert model.experts == 8
    assert {tensor.layer for tensor in model.main if tensor.row.experts} == {1, 3}
    k = next(tensor for tensor in model.main if tensor.name.endswith("k_proj.weight"))
    assert k.shape == (64, 64)
    for lost, name in (("hidden_size", "hidden_size"), ("num_local_experts", "num_experts")):
        with pytest.raises(ConfigError, match=name):
            LogicalModel.from_config({key: value for key, value in config.items() if key != lost})


def test_noise_tells_elements_tensors_and_seeds_apart() -> None:
    spec = TensorSpec("model.layers.1.mlp.experts.up_proj.weight", (8, 48, 64), "float32")
    noise = element_noise(spec, spec.box, seed=1)
    assert noise.abs().max() <= 1
    assert noise.mean().abs() < 0.02
    assert (noise.std() - 3**-0.5).abs() < 0.02
    others = [
        element_noise(spec, spec.box, seed=2),
        element_noise(replace(spec, name="model.layers.2.mlp.experts.up_proj.weight"), spec.box, seed=1),
        *(noise.roll(1, dim) for dim in range(3)),
    ]
    for other in others:
        pair = torch.stack([noise.flatten(), other.flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.03


def test_boxes_are_read_across_experts_and_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, kind="qwen3_moe")
    spec = TensorSpec("model.layers.1.mlp.experts.up_proj.weight", (8, 48, 64), "float32")
    reader = CheckpointReader(tmp_path)
    whole = torch.zeros(spec.shape)
    reader.copy_into(whole, spec, spec.box)
    box = type(spec.box).of((2, 5), (7, 31), (0, 3))
    some = torch.zeros(box.shape, dtype=torch.bfloat16)
    reader.copy_into(some, spec, box)
    assert torch.equal(some, whole[2:5, 7:31, 0:3].bfloat16())
    assert whole.abs().sum(dim=(1, 2)).min() > 0
    wrong = TensorSpec("model.norm.weight", (65,), "float32")
    with pytest.raises(LayoutError, match=r"\[65\].*\[64\]"):
        reader.copy_into(torch.zeros(65), wrong, wrong.box)
    missing = TensorSpec("model.layers.9.input_layernorm.weight", (64,), "float32")
    with pytest.raises(LayoutError, match=r"layers\.9"):
        reader.copy_into(torch.zeros(64), missing, missing.box)
    assert read_config(tmp_path)["architectures"] == ["Qwen3MoeForCausalLM"]
    make_checkpoint(tmp_path / "split", kind="qwen3_moe", max_shard_size="200KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    reader = CheckpointReader(tmp_path / "split")
    again = torch.zeros(spec.shape)
    reader.copy_into(again, spec, spec.box)
    assert torch.equal(again, whole)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        CheckpointReader(tmp_path)
