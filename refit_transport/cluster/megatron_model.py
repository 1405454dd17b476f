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
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.megatron_cpu import tied_embeddings_stay_on_cpu
from refit_transport.cluster.megatron_families import family_options, rotary_options
from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.megatron import MegatronSource
from refit_transport.views import piece_view


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm marked for sequence parallelism; Megatron's own wrapper of torch's norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_ignored: object) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron reads this attribute; torch's Parameter doesn't declare it.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Attention whose values are of another width than its queries; Megatron's own local class takes one width.

    Latent attention builds one without widths first, and throws it away.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        if k_channels is not None and v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            self.hidden_size_per_attention_head = k_channels


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
    return (MLATransformerConfig if "multi_latent_attention" in options else TransformerConfig)(**options)


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


def build_chunks(facts: Facts, model: LogicalModel, megatron: TransformerConfig, *, vocab: int) -> tuple[GPTModel, ...]:
    """This rank's model chunks, in virtual-pipeline order. Collective over the embedding group when tied.

    `vocab` is the padded vocabulary. Needs Megatron's parallel state.
    """
    count = megatron.virtual_pipeline_model_parallel_size
    stages = (None,) if count is None else tuple(range(count))
    with tied_embeddings_stay_on_cpu():
        return tuple(_build_chunk(facts, model, megatron, vocab=vocab, stage=stage) for stage in stages)


def _build_chunk(
    facts: Facts, model: LogicalModel, megatron: TransformerConfig, *, vocab: int, stage: int | None
) -> GPTModel:
    spec = get_gpt_decoder_block_spec(megatron, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    changes: dict[object, object] = {}
    if megatron.sequence_parallel:
        changes[WrappedTorchNorm] = SequenceParallelRMSNorm
    if megatron.multi_latent_attention:
        changes[DotProductAttention] = LatentDotProductAttention
    spec = _replaced(spec, changes)
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=facts.size("max_position_embeddings", default=4096),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=not any(tensor.group == "lm_head" for tensor in model.main),
        position_embedding_type="rope",
        **rotary_options(facts),
        vp_stage=stage,
    )


def _replaced(spec: Any, changes: Mapping[object, object]) -> Any:
    """A copy of a module spec in which other classes stand for some of Megatron's."""
    if isinstance(spec, type):
        return changes.get(spec, spec)
    if isinstance(spec, list):
        return [_replaced(item, changes) for item in spec]
    if dataclasses.is_dataclass(spec):
        parts = {field.name: _replaced(getattr(spec, field.name), changes) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)  # type: ignore[type-var]
    return spec


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
