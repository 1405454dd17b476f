"""Proves, layer by layer, whether vLLM computes with the parameters as its loader wrote them.

A kernel layout can keep a parameter's shape and dtype, and a kernel can compute with a packed copy beside an untouched
parameter. So looks decide nothing: the live bytes must equal the loaded checkpoint's, and where the layer can be
applied alone, its output must follow an exact change of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from refit_transport.targets.loader_trace import Region, Write
from refit_transport.targets.vllm_layers import Layer

Remedy = Literal["reprocess", "stage"]


@dataclass(frozen=True, slots=True)
class PrivateLayer:
    """A layer that computes with something else than the tensors that its loader wrote, and how a refit treats it.

    `reprocess`: the parameters themselves are in load format and are written directly; the layer's post-load
    processing then makes the kernel's copy anew. `stage`: load-format parameters are made for each refit, and
    processed into the kernel's.
    """

    layer: str
    reason: str
    remedy: Remedy


def region_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The live view that a traced region stands for."""
    offset = int(tensor.storage_offset()) + region.view.offset
    return torch.as_strided(tensor.data, region.view.shape, region.view.strides, offset)


ReadPart = Callable[[Write], torch.Tensor | None]
"""Reads the elements that a write copied from the loaded checkpoint; None when that hasn't got them."""


@torch.no_grad()
def judge(
    layer: Layer, writes: Sequence[Write], zeroed: Sequence[Region], checkpoint: ReadPart | None
) -> PrivateLayer | None:
    """None when writing the layer's parameters is all that a refit has to do.

    `writes` and `zeroed` are the traced ones of this layer's parameters. Without a checkpoint, only layers without
    processing, and unquantized linear layers and embeddings that compute what their weight says, are taken as live.
    """
    problem = _form_problem(layer)
    if problem is None and checkpoint is not None:
        problem = _bytes_problem(layer, writes, zeroed, checkpoint)
    if problem is None and (layer.quant_method is not None or layer.processes_attention):
        regions = (*(write.region for write in writes), *zeroed)
        problem = _unproven_problem(layer, {region.parameter for region in regions}, checkpoint)
    if problem is not None:
        return PrivateLayer(layer.name, problem, "stage")
    problem = _follow_problem(layer)
    if problem is not None:
        return PrivateLayer(layer.name, problem, "stage" if checkpoint is None else "reprocess")
    return None


def _form_problem(layer: Layer) -> str | None:
    for slot in layer.slots:
        live = layer.live(slot)
        if live is None:
            return f"{slot.attribute} doesn't exist after processing"
        if live.shape != slot.form.shape:
            return f"{slot.attribute} has shape {list(live.shape)} instead of {list(slot.form.shape)}"
        if live.dtype != slot.form.dtype:
            return f"{slot.attribute} is {live.dtype} instead of {slot.form.dtype}"
        if live.stride() != slot.form.stride():
            return f"{slot.attribute} has strides {live.stride()} instead of {slot.form.stride()}"
    return None


def _bytes_problem(layer: Layer, writes: Iterable[Write], zeroed: Iterable[Region], checkpoint: ReadPart) -> str | None:
    live = {slot.name: tensor for slot in layer.slots if (tensor := layer.live(slot)) is not None}
    for write in writes:
        held = region_of(live[write.region.parameter], write.region)
        loaded = checkpoint(write)
        if loaded is None:
            return f"the checkpoint lacks {write.source}{write.box} to compare {write.region.parameter} with"
        if not same_bytes(held, loaded.to(device=held.device, dtype=held.dtype)):
            return f"{write.region.parameter} differs from the loaded {write.source}{write.box}"
    for region in zeroed:
        if bool(torch.count_nonzero(region_of(live[region.parameter], region))):
            return f"the padding of {region.parameter} isn't zero"
    return None


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality of bits, so that NaNs are equal to themselves and -0 differs from 0."""
    one, other = _bits(first), _bits(second)
    return torch.equal(one, other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    # `contiguous` isn't enough: a single element may have a stride of 0 and counts as contiguous.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _unproven_problem(layer: Layer, written: Collection[str], checkpoint: ReadPart | None) -> str | None:
    """What keeps a layer with post-load processing from being proven, though its parameters look right."""
    opaque = [slot.attribute for slot in layer.slots if slot.is_parameter and slot.name not in written]
    if opaque:
        return f"{opaque[0]} can't be compared with the checkpoint"
    if checkpoint is not None:
        return None
    known = isinstance(layer.quant_method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
    if known and _weight(layer) is not None and _means_linear(layer):
        return None
    return "there is no checkpoint to compare its weights with"


def _weight(layer: Layer) -> torch.Tensor | None:
    """The weight of a layer that can be applied alone."""
    weight = layer.module._parameters.get("weight")
    alone = isinstance(layer.module, (LinearBase, VocabParallelEmbedding))
    return weight if alone and weight is not None and weight.dim() == 2 else None


def _probe(weight: torch.Tensor) -> torch.Tensor:
    """Two rows of inputs of small, distinct values that are exact in every dtype."""
    columns = weight.shape[1]
    values = torch.arange(2 * columns, device=weight.device) % 13 - 6
    return (values.reshape(2, columns) / 4).to(weight.dtype)


def _means_linear(layer: Layer) -> bool:
    weight = _weight(layer)
    if weight is None:
        return False
    inputs = _probe(weight)
    expected = torch.nn.functional.linear(inputs.float(), weight.data.float())
    got = layer.quant_method.apply(layer.module, inputs, bias=None).float()
    return torch.allclose(got, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def _follow_problem(layer: Layer) -> str | None:
    """Doubles the weight in place, which is exact, and looks whether the output doubles.

    An embedding is used by look-up and, when it is tied to the head, as a matrix: both must follow.
    """
    weight, method = _weight(layer), layer.quant_method
    if weight is None or method is None:
        return None
    uses: list[Callable[[], torch.Tensor]] = [lambda: method.apply(layer.module, _probe(weight), bias=None)]
    if not isinstance(layer.module, (LinearBase, ParallelLMHead)):
        rows = torch.arange(min(8, weight.shape[0]), device=weight.device)
        uses.append(lambda: method.embedding(layer.module, rows))
    saved = weight.data.clone()
    try:
        before = [use().clone() for use in uses]
        weight.data.mul_(2)
        after = [use() for use in uses]
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"it can't be applied alone to prove which weights it uses ({error})"
    finally:
        weight.data.copy_(saved)
    if any(not bool(torch.count_nonzero(output)) for output in before):
        return "its output is zero, which can't prove which weights it uses"
    if all(torch.equal(later, 2 * earlier) for earlier, later in zip(before, after, strict=True)):
        return None
    return "it computes with a copy of its weight"
