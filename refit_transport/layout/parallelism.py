"""How a Megatron policy is cut over its ranks, and whether a model can be cut so. Pure: no torch, no megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refit_transport.layout.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class MegatronParallelism:
    """Megatron's parallel sizes; data parallelism fills the rest of the world.

    `expert_tensor` 0 means Megatron's default, the same as `tensor`. `virtual_pipeline` counts the model chunks of a
    rank. `first_stage_layers` and `last_stage_layers` (0: an even share) make the pipeline uneven.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 0
    sequence_parallel: bool = False
    first_stage_layers: int = 0
    last_stage_layers: int = 0

    def __str__(self) -> str:
        return (
            f"tensor {self.tensor}, pipeline {self.pipeline} x {self.virtual_pipeline}, expert {self.expert}, "
            f"expert tensor {self.experts_over}"
        )

    @property
    def experts_over(self) -> int:
        """The number of ranks that each expert's matrices are cut over."""
        return self.expert_tensor or self.tensor


@dataclass(frozen=True, slots=True)
class MegatronPlace:
    """Where a rank stands: its index in its tensor, expert-tensor and expert group, and its pipeline stage."""

    tensor: int
    expert_tensor: int
    expert: int
    stage: int


def place_of(rank: int, cut: MegatronParallelism, *, world_size: int) -> MegatronPlace:
    """A rank's place under Megatron's order of ranks, `tp-cp-ep-dp-pp`.

    Stages are outermost. Inside a stage the tensor index changes fastest for dense weights, and for experts the
    expert-tensor index, then the expert index. Context and data parallelism only add replicas.

    >>> place_of(5, MegatronParallelism(tensor=2, pipeline=2, expert=2, expert_tensor=1), world_size=8)
    MegatronPlace(tensor=1, expert_tensor=0, expert=1, stage=1)
    """
    stage, inner = divmod(rank, world_size // cut.pipeline)
    over = cut.experts_over
    return MegatronPlace(inner % cut.tensor, inner % over, inner // over % cut.expert, stage)


def stage_layers(layers: int, cut: MegatronParallelism) -> tuple[tuple[int, ...], ...]:
    """The layers of each pipeline stage, ascending: numbered chunk by chunk, and inside a chunk stage by stage.

    >>> stage_layers(8, MegatronParallelism(pipeline=2, virtual_pipeline=2))
    ((0, 1, 4, 5), (2, 3, 6, 7))
    >>> stage_layers(5, MegatronParallelism(pipeline=2, last_stage_layers=1))
    ((0, 1, 2, 3), (4,))
    """
    sizes = [cut.first_stage_layers, *(0 for _ in range(cut.pipeline - 2)), cut.last_stage_layers]
    sizes = sizes if cut.pipeline > 1 else [layers]
    even = sizes.count(0)
    share = (layers - sum(sizes)) // even if even else 0
    numbers = iter(range(layers))
    held: list[list[int]] = [[] for _ in sizes]
    for _ in range(cut.virtual_pipeline):
        for stage, size in enumerate(sizes):
            held[stage] += [next(numbers) for _ in range((size or share) // cut.virtual_pipeline)]
    return tuple(map(tuple, held))


def padded_vocab(vocab: int, *, divisible_by: int, tensor: int) -> int:
    """The vocabulary's rows on the Megatron side: the next multiple of `divisible_by * tensor`.

    >>> padded_vocab(251, divisible_by=1, tensor=2), padded_vocab(151, divisible_by=16, tensor=2)
    (252, 160)
    """
    unit = divisible_by * tensor
    return -(-vocab // unit) * unit


def check_parallelism(model: ModelShape, parallelism: MegatronParallelism, *, world_size: int) -> tuple[str, ...]:
    """Every reason why this model can't run so on this many ranks; empty when it can.

    >>> model = ModelShape("Qwen3ForCausalLM", 4, 64, 256, 4, 2, 16, 96, qk_norm=True)
    >>> check_parallelism(model, MegatronParallelism(tensor=3), world_size=3)
    ('tensor parallel size 3 does not divide the 4 attention heads', \
'tensor parallel size 3 neither divides nor is a multiple of the 2 KV heads')
    """
    return (
        *_ranks(parallelism, world_size),
        *_widths(model, parallelism),
        *_stages(model, parallelism),
        *_experts(model, parallelism),
    )


def _ranks(cut: MegatronParallelism, world_size: int) -> Iterator[str]:
    sizes = (cut.tensor, cut.pipeline, cut.virtual_pipeline, cut.expert, cut.experts_over)
    if min(sizes) < 1:
        yield f"every parallel size must be at least 1 (got {sizes})"
    elif world_size % (cut.tensor * cut.pipeline):
        yield f"tensor x pipeline = {cut.tensor} x {cut.pipeline} does not divide the {world_size} ranks"
    elif world_size % (cut.experts_over * cut.expert * cut.pipeline):
        yield (
            f"expert tensor x expert x pipeline = {cut.experts_over} x {cut.expert} x {cut.pipeline} does not divide "
            f"the {world_size} ranks"
        )
    if cut.sequence_parallel and cut.tensor == 1:
        yield "sequence parallelism needs a tensor parallel size above 1"


def _widths(model: ModelShape, cut: MegatronParallelism) -> Iterator[str]:
    widths = [("attention heads", model.heads, cut.tensor, "tensor")]
    if len(model.moe_layers) < model.layers:
        widths.append(("rows of intermediate_size", model.intermediate, cut.tensor, "tensor"))
    if model.shared_intermediate:
        widths.append(("rows of the shared experts", model.shared_intermediate, cut.tensor, "tensor"))
    if model.moe_layers:
        widths.append(("rows of moe_intermediate_size", model.moe_intermediate, cut.experts_over, "expert tensor"))
    for what, size, count, name in widths:
        if count > 0 and size % count:
            yield f"{name} parallel size {count} does not divide the {size} {what}"
    if cut.tensor > 0 and model.kv_heads % cut.tensor and cut.tensor % model.kv_heads:
        yield f"tensor parallel size {cut.tensor} neither divides nor is a multiple of the {model.kv_heads} KV heads"


def _stages(model: ModelShape, cut: MegatronParallelism) -> Iterator[str]:
    if cut.virtual_pipeline > 1 and cut.pipeline == 1:
        yield "virtual pipeline stages need a pipeline parallel size above 1"
    chosen = [layers for layers in (cut.first_stage_layers, cut.last_stage_layers) if layers]
    stages, layers = cut.pipeline - len(chosen), model.layers - sum(chosen)
    if stages < 0 or (stages == 0 and layers) or layers < 0:
        yield f"first and last stage of {chosen} layers don't add up to {model.layers} layers on {cut.pipeline} stages"
    elif stages and layers % (stages * max(1, cut.virtual_pipeline)):
        yield (
            f"{stages} pipeline stages with {cut.virtual_pipeline} chunks each do not divide {layers} layers; "
            "set first_stage_layers or last_stage_layers"
        )
    for size in chosen:
        if size % max(1, cut.virtual_pipeline):
            yield f"{cut.virtual_pipeline} chunks do not divide a stage of {size} layers"


def _experts(model: ModelShape, cut: MegatronParallelism) -> Iterator[str]:
    if not model.moe_layers:
        if cut.expert > 1:
            yield f"expert parallel size {cut.expert} on a model without experts"
        return
    if cut.expert > 0 and model.experts % cut.expert:
        yield f"expert parallel size {cut.expert} does not divide the {model.experts} experts"
    if cut.tensor > 1 and not cut.sequence_parallel:
        yield "Megatron trains experts under tensor parallelism only with sequence parallelism"
