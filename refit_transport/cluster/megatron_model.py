"""Builds this rank's share of a Megatron GPT model for a checkpoint's config, and fills it from the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.megatron_cpu import tied_embeddings_stay_on_cpu
from refit_transport.errors import ConfigError, Violation
from refit_transport.layout.model_shape import ModelShape
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.sources.megatron import MegatronSource
from refit_transport.views import piece_view


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm marked for sequence parallelism; Megatron's own wrapper of torch's norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_ignored: object) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron reads this attribute; torch's Parameter doesn't declare it.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def initialize_parallel_state(cut: MegatronParallelism, *, timeout_s: float) -> None:
    """Creates Megatron's process groups and its random number trackers. Collective over all ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=cut.tensor,
        pipeline_model_parallel_size=cut.pipeline,
        virtual_pipeline_model_parallel_size=cut.virtual_pipeline if cut.virtual_pipeline > 1 else None,
        expert_model_parallel_size=cut.expert,
        expert_tensor_parallel_size=cut.experts_over,
        distributed_timeout_minutes=timeout_s / 60,
    )
    # The model has no dropout and is filled from a checkpoint: the tracker whose `fork` does nothing is enough, and
    # the only one that needs no CUDA.
    initialize_rng_tracker(inference_rng_tracker=True)


def transformer_config(
    config: Mapping[str, Any], model: ModelShape, cut: MegatronParallelism, *, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's config for a Hugging Face config.

    Raises:
        ConfigError: the config asks for something that this mapping doesn't cover.
    """
    _refuse_unsupported(config)
    options: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_parallel_options(cut),
        **_PLAIN_KERNELS,
    }
    if model.moe_layers:
        options |= _expert_options(config, model)
    return TransformerConfig(**options)


# Fused kernels come with apex or TransformerEngine; plain torch runs everywhere.
_PLAIN_KERNELS: Mapping[str, bool] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    # With two stages, previous and next are the same peer, and a batched interleaved schedule would swap activations
    # and gradients.
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,
}


def _parallel_options(cut: MegatronParallelism) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": cut.tensor,
        "pipeline_model_parallel_size": cut.pipeline,
        "virtual_pipeline_model_parallel_size": cut.virtual_pipeline if cut.virtual_pipeline > 1 else None,
        "expert_model_parallel_size": cut.expert,
        "expert_tensor_parallel_size": cut.experts_over,
        "sequence_parallel": cut.sequence_parallel,
        "num_layers_in_first_pipeline_stage": cut.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": cut.last_stage_layers or None,
    }


def _expert_options(config: Mapping[str, Any], model: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": model.experts,
        "moe_ffn_hidden_size": model.moe_intermediate,
        "moe_shared_expert_intermediate_size": model.shared_intermediate or None,
        "moe_router_topk": config["num_experts_per_tok"],
        # Softmax over the chosen experts only is the same as renormalising the full softmax's top k.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        # Gloo has no uneven all-to-all over several dims; all-gather works on every backend.
        "moe_token_dispatcher_type": "allgather",
        **(
            {}
            if len(model.moe_layers) == model.layers
            else {"moe_layer_freq": [int(layer in model.moe_layers) for layer in range(model.layers)]}
        ),
    }


def _rope_theta(config: Mapping[str, Any]) -> float:
    """transformers 5 nests it; 10000 is the default of every supported architecture."""
    nested = config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = [
        Violation(path, str(value), reason, "")
        for path, value, wrong, reason in (
            ("rope_parameters.rope_type", rope_type, rope_type != "default", "only plain rotary embeddings are built"),
            ("hidden_act", config.get("hidden_act"), config.get("hidden_act", "silu") != "silu", "only silu is built"),
            (
                "use_sliding_window",
                config.get("use_sliding_window"),
                bool(config.get("use_sliding_window")),
                "sliding-window attention isn't built",
            ),
            (
                "attention_bias",
                config.get("attention_bias"),
                bool(config.get("attention_bias")),
                "a bias on the output projection isn't built",
            ),
        )
        if wrong
    ]
    if refused:
        raise ConfigError("config.json", tuple(refused))


def build_chunks(
    config: Mapping[str, Any], model: ModelShape, megatron: TransformerConfig, *, vocab: int
) -> tuple[GPTModel, ...]:
    """This rank's model chunks, in virtual-pipeline order. Collective over the embedding group when tied.

    `vocab` is the padded vocabulary. Needs Megatron's parallel state.
    """
    count = megatron.virtual_pipeline_model_parallel_size
    stages = (None,) if count is None else tuple(range(count))
    with tied_embeddings_stay_on_cpu():
        return tuple(_build_chunk(config, model, megatron, vocab=vocab, stage=stage) for stage in stages)


def _build_chunk(
    config: Mapping[str, Any], model: ModelShape, megatron: TransformerConfig, *, vocab: int, stage: int | None
) -> GPTModel:
    spec = get_gpt_decoder_block_spec(megatron, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    if megatron.sequence_parallel:
        spec = _with_norm(spec)
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=int(config.get("max_position_embeddings", 4096)),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=_rope_theta(config),
        vp_stage=stage,
    )


def _with_norm(spec: Any) -> Any:
    """A copy of a module spec in which `SequenceParallelRMSNorm` stands for Megatron's wrapper."""
    if spec is WrappedTorchNorm:
        return SequenceParallelRMSNorm
    if isinstance(spec, list):
        return [_with_norm(item) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: _with_norm(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


def load_checkpoint(chunks: Sequence[nn.Module], source: MegatronSource, folder: Path, *, rank: int) -> None:
    """Fills the chunks' parameters from a checkpoint, through the same manifest that a refit sends from.

    Elements that are no logical element (vocabulary padding) become 0.

    Raises:
        LayoutError: the checkpoint lacks a tensor, or has it in another shape.
    """
    manifest, buffers = source.manifest(rank), source.buffers()
    specs = {spec.name: spec for spec in manifest.tensors}
    reader = CheckpointReader(folder)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
        for piece in manifest.pieces:
            reader.copy_into(piece_view(piece, buffers), specs[piece.tensor], piece.box)
