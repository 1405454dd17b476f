"""Builds this rank's share of a Megatron model for a checkpoint's config, and fills it from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.mamba_cpu import standing_in
from refit_transport.cluster.megatron_cpu import tied_embeddings_stay_on_cpu
from refit_transport.cluster.megatron_families import family_options, rotary_options, yarn_attributes
from refit_transport.cluster.megatron_specs import decoder_spec
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.families import layer_pattern
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.megatron import MegatronSource
from refit_transport.views import piece_view


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
    facts: Facts, model: LogicalModel, cut: MegatronParallelism, *, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's config for a Hugging Face config.

    Raises:
        ConfigError: the config asks for something that this mapping doesn't cover.
    """
    options: dict[str, Any] = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_parallel_options(cut),
        **_PLAIN_KERNELS,
        **family_options(facts, model),
    }
    config = (MLATransformerConfig if "multi_latent_attention" in options else TransformerConfig)(**options)
    for name, value in yarn_attributes(facts).items():
        setattr(config, name, value)
    return config


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


def build_chunks(
    facts: Facts, model: LogicalModel, megatron: TransformerConfig, *, vocab: int
) -> tuple[MegatronModule, ...]:
    """This rank's model chunks, in virtual-pipeline order. Collective over the embedding group when tied.

    `vocab` is the padded vocabulary. Needs Megatron's parallel state.
    """
    count = megatron.virtual_pipeline_model_parallel_size
    stages = (None,) if count is None else tuple(range(count))
    with tied_embeddings_stay_on_cpu():
        chunks = tuple(_build_chunk(facts, model, megatron, vocab=vocab, stage=stage) for stage in stages)
    if model.architecture == "GemmaForCausalLM":
        for chunk in chunks:
            _scale_embedding(chunk, facts.size("hidden_size") ** 0.5)
    return chunks


def _build_chunk(
    facts: Facts, model: LogicalModel, megatron: TransformerConfig, *, vocab: int, stage: int | None
) -> MegatronModule:
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "max_sequence_length": facts.size("max_position_embeddings", default=4096),
        "pre_process": parallel_state.is_pipeline_first_stage(**where),
        "post_process": parallel_state.is_pipeline_last_stage(**where),
        "parallel_output": True,
        "share_embeddings_and_output_weights": not any(tensor.group == "lm_head" for tensor in model.main),
    }
    if megatron.is_hybrid_model:
        with nullcontext() if torch.cuda.is_available() else standing_in():
            from refit_transport.cluster.megatron_mamba import mamba_model

        return mamba_model(megatron, pattern=layer_pattern(facts, "hybrid_override_pattern"), **common)
    spec = decoder_spec(megatron, stage=stage)
    return GPTModel(config=megatron, transformer_layer_spec=spec, vp_stage=stage, **rotary_options(facts), **common)


def _scale_embedding(chunk: nn.Module, scale: float) -> None:
    """Gemma multiplies what the embedding gives; Megatron's embedding doesn't. The first stage's chunk has one."""
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(lambda _module, _inputs, output: output * scale)


def keep_router_biases_wide(chunks: Sequence[nn.Module]) -> None:
    """Megatron widens these buffers to fp32 at the first forward pass: better before they are described."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()


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
    source.write_back()
