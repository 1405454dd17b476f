"""What ranks of the tests of Megatron's own descriptions run: of experts' storage, drafters and rare layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron_ranks import held
from small_models import SMALL

from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.model import LogicalModel

PREFIX = "decoder.layers.0.mlp.experts."
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 16}
MOE |= {"num_attention_heads": 2, "head_dim": 4, "intermediate_size": 8, "num_experts": 4, "moe_intermediate_size": 6}
MOE |= {"num_experts_per_tok": 2, "num_key_value_heads": 2}


@contextmanager
def parallel_state(
    rank: int, world_size: int, port: int, cut: MegatronParallelism, *, context: int = 1
) -> Iterator[None]:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from refit_transport.cluster import megatron_cpu
    from refit_transport.cluster.megatron_model import initialize_parallel_state

    megatron_cpu.apply()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        if context == 1:
            initialize_parallel_state(cut, timeout_s=60)
        else:
            mpu.initialize_model_parallel(cut.tensor, cut.pipeline, context_parallel_size=context)
            initialize_rng_tracker(inference_rng_tracker=True)
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


class Experts(torch.nn.Module):
    """A model that has nothing but the experts of its layer 0."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def sharded_state_dict(self, metadata: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.experts.sharded_state_dict(PREFIX, (), metadata)
        return found


def _config(cut: MegatronParallelism, **changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = {"moe_ffn_hidden_size": 6, "moe_grouped_gemm": True} | changes
    return TransformerConfig(
        **sizes,
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        expert_model_parallel_size=cut.expert,
        expert_tensor_parallel_size=cut.experts_over,
    )


def stacked(rank: int, world_size: int, port: int, cut: MegatronParallelism) -> dict[str, Any]:
    """Megatron's own GroupedMLP, whose `weight1` and `weight2` hold several experts, inputs first."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import grouped_gemm_util
    from megatron.core.transformer.moe.experts import GroupedMLP

    from refit_transport.sources.megatron import MegatronSource

    with parallel_state(rank, world_size, port, cut):
        # Building and describing need no kernel, only Megatron's check for one does.
        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
        experts = GroupedMLP(4 // cut.expert, _config(cut), ProcessGroupCollection.use_mpu_process_groups())
        weights = [experts.weight1, experts.weight2]
        for number, weight in enumerate(weights):
            weight.data = (torch.arange(weight.numel()) + 1000 * rank + 300 * number).view_as(weight).float()
        source = MegatronSource([Experts(experts)], LogicalModel.from_config(MOE))
        manifest, pieces = held(source, rank)
        values = [weight.detach().numpy().copy() for weight in weights]
        with torch.no_grad():
            experts.weight2[0, 0] = -1
        followed = min(float(piece.min()) for piece in held(source, rank)[1])
        return {"manifest": manifest, "pieces": pieces, "weights": values, "followed": followed}


class GroupedLinear(torch.nn.Module):
    """One parameter per local expert, `weight{K}`, described as Megatron's adapter of TransformerEngine does it.

    TransformerEngine flags none of these parameters as tensor-parallel. Without an axis, each rank describes its own
    part as the whole.
    """

    def __init__(self, rows: int, columns: int, cut: MegatronParallelism, axis: int | None) -> None:
        super().__init__()
        self.axes, self.count = {} if axis is None else {"weight": axis}, 4 // cut.expert
        for number in range(self.count):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.randn(rows, columns)))

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
        from megatron.core import parallel_state as mpu
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        found: dict[str, Any] = {}
        for number in range(self.count):
            expert = mpu.get_expert_model_parallel_rank() * self.count + number
            (sharded,) = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{number}")},
                prefix,
                self.axes,
                (*sharded_offsets, (len(sharded_offsets), expert, 4)),
                tp_group=mpu.get_expert_tensor_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            found[f"{prefix}weight{number}"] = sharded
        return found


def _grouped(cut: MegatronParallelism, *, width: int, axes: tuple[int | None, int | None] = (0, 1)) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.config, experts.num_local_experts = _config(cut), 4 // cut.expert
    experts.tp_group, experts.ep_group = mpu.get_expert_tensor_parallel_group(), mpu.get_expert_model_parallel_group()
    mine = width // cut.experts_over
    experts.linear_fc1 = GroupedLinear(2 * mine, 8, cut, axes[0])
    experts.linear_fc2 = GroupedLinear(8, mine, cut, axes[1])
    return experts


def grouped(rank: int, world_size: int, port: int, cut: MegatronParallelism) -> dict[str, Any]:
    """Megatron's TEGroupedMLP describes itself, with linear layers that need no TransformerEngine."""
    from refit_transport.sources.megatron import MegatronSource

    with parallel_state(rank, world_size, port, cut):
        torch.manual_seed(rank)
        experts = _grouped(cut, width=6)
        manifest, pieces = held(MegatronSource([Experts(experts)], LogicalModel.from_config(MOE)), rank)
        weights = {name: value.detach().numpy().copy() for name, value in experts.named_parameters()}
        return {"manifest": manifest, "pieces": pieces, "weights": weights}


def hiding(rank: int, world_size: int, port: int, kind: str) -> str:
    """What a rank says of experts of 512 columns over two ranks, whose shards don't show that they are shards."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from refit_transport.errors import LayoutError
    from refit_transport.sources.megatron import MegatronSource

    cut = MegatronParallelism(expert_tensor=2)
    with parallel_state(rank, world_size, port, cut):
        if kind.startswith("grouped"):
            experts = _grouped(cut, width=512, axes=(None, 1) if kind == "grouped, up" else (0, None))
        else:
            submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            config = _config(cut, moe_ffn_hidden_size=512, moe_grouped_gemm=False)
            experts = SequentialMLP(4, config, submodules, ProcessGroupCollection.use_mpu_process_groups())
            if kind == "one by one, down":
                experts.local_experts[2].linear_fc2.weight.tensor_model_parallel = False
        model = LogicalModel.from_config(MOE | {"moe_intermediate_size": 512})
        try:
            MegatronSource([Experts(experts)], model).manifest(rank)
        except LayoutError as error:
            return str(error)
        return ""


def drafting(rank: int, world_size: int, port: int, cut: MegatronParallelism) -> dict[str, Any]:
    """A GPT model with a layer for multi-token prediction: everything that it holds, by checkpoint name."""
    from refit_transport.cluster.megatron_cpu import tied_embeddings_stay_on_cpu
    from refit_transport.sources.megatron import MegatronSource

    config = SMALL["glm"] | {"num_nextn_predict_layers": 1, "model_type": "glm4_moe"}
    model = LogicalModel.from_config(config)
    with parallel_state(rank, world_size, port, cut), tied_embeddings_stay_on_cpu():
        chunk = drafting_model(config, model, cut, dtype=torch.float32)
        manifest, pieces = held(MegatronSource([chunk], model), rank)
        names = [name for name, _ in chunk.named_parameters()]
        return {"manifest": manifest, "pieces": pieces, "names": names}


def drafting_model(config: dict[str, Any], model: LogicalModel, cut: MegatronParallelism, *, dtype: torch.dtype) -> Any:
    """This rank's GPT model of that config, with one layer for multi-token prediction."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    from refit_transport.cluster.megatron_model import transformer_config

    megatron = transformer_config(Facts(config, "config.json"), model, cut, dtype=dtype)
    megatron.mtp_num_layers = 1
    torch.manual_seed(0)
    spec = get_gpt_decoder_block_spec(megatron, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=256,
        max_sequence_length=64,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(megatron, spec, use_transformer_engine=False),
    )


def described(
    rank: int,
    world_size: int,
    port: int,
    config: dict[str, Any],
    cut: MegatronParallelism,
    stages: list[list[str]] | None = None,
    context: int = 1,
) -> dict[str, Any]:
    """A model of that config with stages given layer by layer, or with context parallelism's groups."""
    import dataclasses

    from refit_transport.cluster.megatron_model import build_chunks, transformer_config
    from refit_transport.sources.megatron import MegatronSource

    model, facts = LogicalModel.from_config(config), Facts(config, "config.json")
    with parallel_state(rank, world_size, port, cut, context=context):
        megatron = transformer_config(facts, model, cut, dtype=torch.float32)
        if stages is not None:
            megatron = dataclasses.replace(megatron, pipeline_model_parallel_layout=stages)
        chunks = build_chunks(facts, model, megatron, vocab=256)
        return {"manifest": MegatronSource(chunks, model).manifest(rank)}
