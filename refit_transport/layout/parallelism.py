"""How a Megatron policy is cut over its ranks, and whether a model can be cut so. Pure: no torch, no megatron.

The functions called `..._misfits` are about one concern each and take the sizes that they read, all at least 1. So a
caller that knows some of the sizes only (a configuration with a misspelt key) still learns what is wrong with those.
Those about a model's tensors stand in `presets/building.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from refit_transport.errors import ConfigError, Violation


class Layered(Protocol):
    """What has a number of layers."""

    @property
    def layers(self) -> int: ...


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


Size = Literal[
    "ranks",
    "tensor",
    "sequence_parallel",
    "pipeline",
    "virtual_pipeline",
    "first_stage_layers",
    "last_stage_layers",
    "expert",
    "expert_tensor",
]

_SPELT: Mapping[Size, str] = {
    "ranks": "tensor x pipeline",
    "tensor": "tensor parallel size",
    "sequence_parallel": "sequence parallelism",
    "pipeline": "pipeline parallel size",
    "virtual_pipeline": "virtual pipeline parallel size",
    "first_stage_layers": "layer count of the first stage",
    "last_stage_layers": "layer count of the last stage",
    "expert": "expert parallel size",
    "expert_tensor": "expert tensor parallel size",
}


@dataclass(frozen=True, slots=True)
class Misfit:
    """One size that doesn't fit the model, the ranks or another size, and why.

    `size` is a field of `MegatronParallelism`, or "ranks": the product of tensor and pipeline size.

    >>> str(Misfit("tensor", 3, "must divide the model's 4 attention heads"))
    "tensor parallel size 3 must divide the model's 4 attention heads"
    """

    size: Size
    value: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.got} {self.reason}"

    @property
    def name(self) -> str:
        """The size in words."""
        return _SPELT[self.size]

    @property
    def got(self) -> str:
        """The value as YAML spells it."""
        return str(self.value).lower()


def require_fit(misfits: Iterable[Misfit]) -> None:
    """
    Raises:
        ConfigError: there is a misfit; it has one violation for each.
    """
    violations = tuple(Violation(misfit.name, misfit.got, misfit.reason, "") for misfit in misfits)
    if violations:
        raise ConfigError("parallelism", violations)


def size_misfits(cut: MegatronParallelism) -> Iterator[Misfit]:
    """Every size is at least 1."""
    sizes: dict[Size, int] = {
        "tensor": cut.tensor,
        "pipeline": cut.pipeline,
        "virtual_pipeline": cut.virtual_pipeline,
        "expert": cut.expert,
        "expert_tensor": cut.experts_over,
    }
    for size, value in sizes.items():
        if value < 1:
            yield Misfit(size, value, "must be at least 1")


def dense_rank_misfits(ranks: int, *, tensor: int, pipeline: int) -> Iterator[Misfit]:
    """Whole copies of the dense weights fill the training ranks."""
    if ranks % (tensor * pipeline):
        yield Misfit("ranks", tensor * pipeline, f"must divide the {ranks} training ranks")


def expert_rank_misfits(ranks: int, *, pipeline: int, expert: int, expert_tensor: int) -> Iterator[Misfit]:
    """Whole copies of the experts fill the training ranks."""
    if ranks % (expert_tensor * expert * pipeline):
        others = f"expert tensor x pipeline = {expert_tensor} x {pipeline}"
        yield Misfit("expert", expert, f"times {others} must divide the {ranks} training ranks")


def sequence_misfits(*, tensor: int, sequence_parallel: bool) -> Iterator[Misfit]:
    """Sequence parallelism is over the tensor-parallel ranks."""
    if sequence_parallel and tensor == 1:
        yield Misfit("sequence_parallel", sequence_parallel, "needs a tensor parallel size above 1")


def stage_misfits(
    model: Layered, *, pipeline: int, virtual_pipeline: int, first_stage_layers: int, last_stage_layers: int
) -> Iterator[Misfit]:
    """Every stage has layers, as many as the next but for the first and the last where they are set (0: not set)."""
    chosen: dict[Size, int] = {"first_stage_layers": first_stage_layers, "last_stage_layers": last_stage_layers}
    chosen = {size: layers for size, layers in chosen.items() if layers}
    if pipeline == 1:
        chunks: dict[Size, int] = {"virtual_pipeline": virtual_pipeline} if virtual_pipeline > 1 else {}
        for size, value in (chosen | chunks).items():
            yield Misfit(size, value, "needs a pipeline parallel size above 1")
        return
    taken = sum(chosen.values())
    stages, layers = pipeline - len(chosen), model.layers - taken
    others = f"the {layers} layers of the other stages" if chosen else f"the model's {layers} layers"
    if layers < stages:
        yield Misfit("pipeline", pipeline, f"leaves stages without layers: the model has {model.layers}")
    elif not stages and layers:
        reason = f"leaves layers without a stage: first and last take {taken} of {model.layers}"
        yield Misfit("pipeline", pipeline, reason)
    elif stages and layers % stages:
        yield Misfit("pipeline", pipeline, f"leaves {stages} stages that must divide {others}")
    elif stages and layers // stages % virtual_pipeline:
        yield Misfit("virtual_pipeline", virtual_pipeline, f"must divide the {layers // stages} layers of a stage")
    for size, own in chosen.items():
        if own % virtual_pipeline:
            which = "first" if size == "first_stage_layers" else "last"
            yield Misfit("virtual_pipeline", virtual_pipeline, f"must divide the {own} layers of the {which} stage")
