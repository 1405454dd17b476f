"""An exporter from Megatron to checkpoint tensors, written by hand from Megatron's parameter names: the tests' oracle.

It shares nothing with the package: it gathers whole parameters with collectives and cuts them up by reshapes.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def _gather(parameter: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole parameter from its TP shards; a gated one ([gate | up] per rank) becomes [gates | ups]."""
    local = parameter.detach().clone()
    if not getattr(parameter, "tensor_model_parallel", False) or group.size() == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    stride, dim = parameter.partition_stride, parameter.partition_dim
    return torch.cat([part.chunk(stride, dim)[number] for number in range(stride) for part in parts], dim)


def export(chunks: Any, *, vocab: int) -> dict[str, np.ndarray]:
    """This rank's contribution; the union over ranks is the checkpoint. Collective over TP and ETP."""
    from megatron.core import parallel_state as mpu

    tp, etp = mpu.get_tensor_model_parallel_group(), mpu.get_expert_tensor_parallel_group()
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            full = _gather(parameter, etp if ".experts." in name else tp)
            if name == "embedding.word_embeddings.weight":
                found["model.embed_tokens.weight"] = full[:vocab]
            elif name == "output_layer.weight":
                head = "model.embed_tokens.weight" if chunk.share_embeddings_and_output_weights else "lm_head.weight"
                found[head] = full[:vocab]
            elif name == "decoder.final_layernorm.weight":
                found["model.norm.weight"] = full
            else:
                _, _, local, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(local)].layer_number - 1
                for inner, tensor in _layer_tensors(rest, full, chunk.config, mpu):
                    found[f"model.layers.{layer}.{inner}"] = tensor
    return {name: tensor.float().numpy() for name, tensor in found.items()}


def largest_padding(chunks: Any, *, vocab: int) -> float:
    """The largest absolute value in the rows past the vocabulary, which must be 0. Collective over TP."""
    from megatron.core import parallel_state as mpu

    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    found = [
        _gather(parameter, mpu.get_tensor_model_parallel_group())[vocab:].abs().sum()
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if name in tables
    ]
    return float(sum(found))


def _layer_tensors(rest: str, full: torch.Tensor, config: Any, mpu: Any) -> list[tuple[str, torch.Tensor]]:
    if rest in _PLAIN:
        return [(_PLAIN[rest], full)]
    kind = rest.rsplit(".", 1)[-1]
    if rest.startswith("self_attention.linear_qkv."):
        groups, heads, width = config.num_query_groups, config.num_attention_heads, config.kv_channels
        blocks = full.reshape(groups, heads // groups + 2, width, -1)
        shape = (-1,) if kind == "bias" else (-1, full.shape[1])
        return [
            (f"self_attn.q_proj.{kind}", blocks[:, :-2].reshape(shape)),
            (f"self_attn.k_proj.{kind}", blocks[:, -2].reshape(shape)),
            (f"self_attn.v_proj.{kind}", blocks[:, -1].reshape(shape)),
        ]
    if rest == "mlp.linear_fc1.weight":
        gate, up = full.chunk(2)
        return [("mlp.gate_proj.weight", gate), ("mlp.up_proj.weight", up)]
    match = _EXPERT.fullmatch(rest)
    if match is None:
        raise KeyError(rest)
    per_rank = config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
    prefix = f"mlp.experts.{mpu.get_expert_model_parallel_rank() * per_rank + int(match[1])}"
    if match[2] == "2":
        return [(f"{prefix}.down_proj.weight", full)]
    gate, up = full.chunk(2)
    return [(f"{prefix}.gate_proj.weight", gate), (f"{prefix}.up_proj.weight", up)]
