"""What the ranks of vLLM engines need, from the model's and the parallel sizes alone: no process, no vllm, no trace.

The trace of the loader (`targets.vllm`) is the truth; this says the same beforehand for the architectures of
`ModelShape`. What a trace alone can know, it can't: tensors that must arrive whole, and layers of a private layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.layout import piece_of_its_own
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
from refit_transport.layout.model_shape import ModelShape
from refit_transport.layout.parallelism import engine_misfits, require_fit
from refit_transport.layout.placement import even_split

Cut = Literal["whole", "vocabulary", "rows", "kv_rows", "columns", "expert_rows", "expert_columns"]

VOCABULARY_MULTIPLE = 64

# By name outside the layers, or inside a layer.
_CUTS: Mapping[str, Cut] = {
    "model.embed_tokens.weight": "vocabulary",
    "model.norm.weight": "whole",
    "lm_head.weight": "vocabulary",
    "input_layernorm.weight": "whole",
    "post_attention_layernorm.weight": "whole",
    "self_attn.q_proj.weight": "rows",
    "self_attn.q_proj.bias": "rows",
    "self_attn.k_proj.weight": "kv_rows",
    "self_attn.k_proj.bias": "kv_rows",
    "self_attn.v_proj.weight": "kv_rows",
    "self_attn.v_proj.bias": "kv_rows",
    "self_attn.q_norm.weight": "whole",
    "self_attn.k_norm.weight": "whole",
    "self_attn.o_proj.weight": "columns",
    "mlp.gate_proj.weight": "rows",
    "mlp.up_proj.weight": "rows",
    "mlp.down_proj.weight": "columns",
    "mlp.gate.weight": "whole",
    "mlp.experts.gate_proj.weight": "expert_rows",
    "mlp.experts.up_proj.weight": "expert_rows",
    "mlp.experts.down_proj.weight": "expert_columns",
    "mlp.shared_expert.gate_proj.weight": "rows",
    "mlp.shared_expert.up_proj.weight": "rows",
    "mlp.shared_expert.down_proj.weight": "columns",
    "mlp.shared_expert_gate.weight": "whole",
}
_LAYER = re.compile(r"^model\.layers\.\d+\.")


def vllm_manifest(
    tensors: Iterable[TensorSpec],
    model: ModelShape,
    *,
    tensor_parallel: int,
    expert_parallel: bool = False,
    engines: int = 1,
    first_rank: int = 0,
    dtype: str,
) -> Manifest:
    """The target side that `targets.vllm.VllmTarget` would describe, for the source's `tensors`.

    Ranks count from `first_rank`, engine by engine; an engine has one pipeline stage. `dtype` is the engines' own. With
    `expert_parallel` the ranks of an engine share out whole experts, else each takes a part of every expert. Buffers
    are symbolic: one per piece.

    Raises:
        ConfigError: the model can't be cut so; gives all reasons.
        LayoutError: a tensor that isn't in the table here, or one whose size doesn't divide.

    Two ranks, one KV head, 250 rows of vocabulary padded to 256:

    >>> model = ModelShape("Qwen3ForCausalLM", 1, 64, 250, 4, 1, 16, 96)
    >>> tensors = [TensorSpec("lm_head.weight", (250, 64), "float32")]
    >>> tensors += [TensorSpec("model.layers.0.self_attn.k_proj.weight", (16, 64), "float32")]
    >>> manifest = vllm_manifest(tensors, model, tensor_parallel=2, dtype="bfloat16")
    >>> [str(piece.box) for piece in manifest.ranks[1].pieces]
    ['[128:250, 0:64]', '[0:16, 0:64]']
    """
    require_fit(engine_misfits(model, tensor=tensor_parallel, expert=tensor_parallel if expert_parallel else 1))
    specs = [TensorSpec(spec.name, spec.shape, dtype) for spec in tensors]
    ranks: list[tuple[tuple[TensorSpec, ...], tuple[Piece, ...]]] = []
    for index in range(tensor_parallel):
        rank = _Rank(model, tensor_parallel, index, expert_parallel)
        pieces = tuple(piece_of_its_own(spec.name, box) for spec in specs for box in rank.boxes(spec))
        held = {piece.tensor for piece in pieces}
        ranks.append((tuple(spec for spec in specs if spec.name in held), pieces))
    return Manifest.of(
        RankManifest(first_rank + number, "target", *ranks[number % tensor_parallel])
        for number in range(engines * tensor_parallel)
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """One of the `size` ranks of an engine."""

    model: ModelShape
    size: int
    index: int
    spreads_experts: bool

    def boxes(self, spec: TensorSpec) -> Iterator[Box]:
        """What the rank needs of a tensor: a box, or one per expert, as the loader takes them."""
        cut = _CUTS.get(_LAYER.sub("", spec.name))
        if cut is None:
            raise LayoutError(spec.name, -1, "a tensor whose cut in vLLM is known without the engine", "another one")
        if cut in ("expert_rows", "expert_columns"):
            yield from self._experts(spec, dim=1 if cut == "expert_rows" else 2)
            return
        spans = [Span(0, size) for size in spec.shape]
        if cut == "columns":
            spans[1] = self._share(spec, 1)
        elif cut != "whole":
            spans[0] = self._rows(spec, cut)
        if all(span.size for span in spans):
            yield Box(tuple(spans))

    def _rows(self, spec: TensorSpec, cut: Cut) -> Span:
        if cut == "vocabulary":
            padded = -(-spec.shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
            share = even_split(Span(0, padded), parts=self.size, index=self.index, tensor=spec.name)
            return Span(min(share.start, spec.shape[0]), min(share.stop, spec.shape[0]))
        if cut == "kv_rows" and self.model.kv_heads < self.size:
            # Ranks that share a KV head each keep a copy.
            owner = self.index * self.model.kv_heads // self.size
            return even_split(spec.box.spans[0], parts=self.model.kv_heads, index=owner, tensor=spec.name)
        return self._share(spec, 0)

    def _experts(self, spec: TensorSpec, *, dim: int) -> Iterator[Box]:
        numbers, spans = Span(0, spec.shape[0]), [Span(0, size) for size in spec.shape[1:]]
        if self.spreads_experts:
            # The first ranks take the remainder, one each.
            each, more = divmod(spec.shape[0], self.size)
            start = self.index * each + min(self.index, more)
            numbers = Span(start, start + each + (self.index < more))
        else:
            spans[dim - 1] = self._share(spec, dim)
        for number in range(numbers.start, numbers.stop):
            yield Box((Span(number, number + 1), *spans))

    def _share(self, spec: TensorSpec, dim: int) -> Span:
        return even_split(spec.box.spans[dim], parts=self.size, index=self.index, tensor=spec.name)
