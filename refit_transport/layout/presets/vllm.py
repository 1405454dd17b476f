"""What the ranks of vLLM engines need of a model, for any supported architecture."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.layout.box import Span
from refit_transport.layout.manifest import Manifest, Piece
from refit_transport.layout.parallelism import Misfit, require_fit
from refit_transport.layout.presets.building import (
    Pieces,
    Share,
    expert_misfits,
    join,
    padded_to,
    width_misfits,
)
from refit_transport.layout.presets.model import LogicalModel, LogicalTensor

VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class EngineParallelism:
    """vLLM's parallel sizes: `tensor` ranks hold the dense weights, and `data` such groups stand side by side.

    `expert` 1: each rank of a group takes a part of every expert. Else `expert` ranks in a row, of one group or of
    several, share out whole experts.
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    def __str__(self) -> str:
        return f"tensor {self.tensor}, data {self.data}, expert {self.expert}"


def target_manifest(
    model: LogicalModel,
    parallelism: EngineParallelism,
    *,
    first_rank: int,
    dtype: str = "bfloat16",
) -> Manifest:
    """The generation side on ranks `first_rank` and up, engine by engine; an engine has one pipeline stage.

    Every rank has the regions that `targets.vllm.VllmTarget` describes there, one piece for each rectangle. What a
    trace of the loader alone can know, it can't: tensors that must arrive whole, and layers of a private layout.
    Buffers are symbolic. Replicas share their tuples.

    Raises:
        ConfigError: the model can't be cut so; gives all reasons.

    Two ranks, one key-value head, 250 rows of vocabulary padded to 256:

    >>> config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 250}
    >>> config |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96}
    >>> model = LogicalModel.from_config(config)
    >>> rank = target_manifest(model, EngineParallelism(tensor=2), first_rank=0).ranks[1]
    >>> [str(piece.box) for piece in rank.pieces if piece.tensor.endswith(("lm_head.weight", "k_proj.weight"))]
    ['[0:16, 0:64]', '[128:250, 0:64]']
    """
    cut = parallelism
    require_fit(misfits(model, cut))
    places = [(rank % cut.tensor, rank % cut.expert) for rank in range(cut.ranks)]
    pieces = Pieces({each.name: padded_to(each.row.served, VOCABULARY_MULTIPLE) for each in model.main})
    held = {}
    for place in dict.fromkeys(places):
        found: list[Piece] = []
        for tensor in model.main:
            share, experts = _share(tensor, cut, *place)
            found += pieces.of(tensor, share, experts)
        held[place] = tuple(found)
    return join("target", places, held, first=first_rank, dtype=dtype, tensors=model.main)


def misfits(model: LogicalModel, cut: EngineParallelism) -> tuple[Misfit, ...]:
    """Every reason why vLLM engines can't serve this model so; empty when they can."""
    found = [Misfit("tensor", cut.tensor, "must be at least 1")] if cut.tensor < 1 else []
    found += [Misfit("expert", cut.expert, "must be at least 1")] if cut.expert < 1 else []
    if found:
        return tuple(found)
    if cut.expert > 1 and (cut.expert % cut.tensor or cut.ranks % cut.expert):
        reason = f"must be a multiple of the tensor parallel size {cut.tensor} and divide the {cut.ranks} ranks"
        found.append(Misfit("expert", cut.expert, reason))
    found += expert_misfits(model, expert=cut.expert, uneven="taken")
    expert_tensor = cut.tensor if cut.expert == 1 else 1
    return (*found, *width_misfits(model, "target", tensor=cut.tensor, expert_tensor=expert_tensor))


def _share(tensor: LogicalTensor, cut: EngineParallelism, index: int, expert: int) -> tuple[Share, Span | None]:
    if not tensor.row.experts:
        return Share(cut.tensor, index), None
    count = tensor.shape[0]
    if cut.expert == 1:
        return Share(cut.tensor, index), Span(0, count)
    # The first ranks take the remainder, one each.
    each, more = divmod(count, cut.expert)
    start = expert * each + min(expert, more)
    return Share(1, 0), Span(start, start + each + (expert < more))
