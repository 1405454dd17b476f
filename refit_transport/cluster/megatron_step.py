"""One training step and one scoring pass of a Megatron model: micro-batches, losses, gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import nn


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Token ids `[batch, length + 1]`: inputs are all but the last, labels all but the first.

    `mask` `[batch, length]` is 1 where the label is a real token, 0 where it is padding.
    """

    tokens: torch.Tensor
    mask: torch.Tensor


Score = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
Read = Callable[[torch.Tensor, Any], torch.Tensor]


def micro_batches(
    sequences: Sequence[Sequence[int]], *, size: int, length: int, length_multiple: int, count_multiple: int
) -> tuple[MicroBatch, ...]:
    """Cuts sequences of up to `length` tokens into equally shaped micro-batches, padded with masked tokens.

    The predicted length is a multiple of `length_multiple`, the number of micro-batches one of `count_multiple`.

    Raises:
        ValueError: a sequence has fewer than two tokens, or there is none.
    """
    shortest = min((len(sequence) for sequence in sequences), default=0)
    if shortest < 2:
        raise ValueError(f"each sequence needs at least 2 tokens, so that one can be predicted (got {shortest})")
    length = -(-(length - 1) // length_multiple) * length_multiple
    unit = size * count_multiple
    rows = -(-len(sequences) // unit) * unit
    tokens = torch.zeros(rows, length + 1, dtype=torch.int64)
    mask = torch.zeros(rows, length)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
        mask[row, : len(sequence) - 1] = 1.0
    return tuple(MicroBatch(tokens[start : start + size], mask[start : start + size]) for start in range(0, rows, size))


def run_schedule(
    chunks: Sequence[GPTModel], batches: Sequence[MicroBatch], score: Score, *, vocab: int, device: torch.device
) -> list[torch.Tensor]:
    """`run_model` with a `score` of the token log-probabilities `[batch, length]` of a micro-batch."""

    def read(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return score(token_logprobs(true_logits(logits, vocab=vocab), batch.tokens[:, 1:].to(device)), batch)

    return run_model(chunks, batches, read, device=device)


def run_model(
    chunks: Sequence[GPTModel], batches: Sequence[MicroBatch], read: Read, *, device: torch.device
) -> list[torch.Tensor]:
    """Runs Megatron's pipeline schedule, forward and (where gradients are on) backward.

    `read` turns the last stage's output for a micro-batch, usually this rank's logits, into the loss, a scalar whose
    sum over micro-batches is minimised, or into anything else under `torch.no_grad()`. Returns what it found in
    micro-batch order on the last pipeline stage, nothing elsewhere. Collective over all ranks.
    """
    count = len(batches)

    def forward(data: Iterator[MicroBatch], chunk: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(data)
        inputs = batch.tokens[:, :-1].to(device)
        length = inputs.shape[1]
        positions = torch.arange(length, device=device).expand_as(inputs)
        future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        output = chunk(inputs, positions, future)

        def finish(result: torch.Tensor, non_loss_data: bool = False) -> Any:  # noqa: FBT001 - Megatron's call
            result = read(result, batch)
            # Megatron divides a loss by the number of micro-batches; ours is a sum over them.
            return result if non_loss_data else (result * count, result.detach())

        return output, finish

    scores: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=batches[0].mask.shape[1],
        micro_batch_size=batches[0].mask.shape[0],
        forward_only=not torch.is_grad_enabled(),
        collect_non_loss_data=not torch.is_grad_enabled(),
    )
    return scores


def true_logits(logits: torch.Tensor, *, vocab: int) -> torch.Tensor:
    """This rank's logits in fp32, those of the vocabulary's padding too low for any probability.

    `logits` `[batch, length, rows]` are this rank's rows of the padded vocabulary.
    """
    rows = logits.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * rows
    padded = torch.arange(first, first + rows, device=logits.device) >= vocab
    # Not -inf: a rank may hold only padded rows, and inf - inf is no number.
    return logits.float().masked_fill(padded, torch.finfo(torch.float32).min)


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """fp32 log-probability `[batch, length]` of each label; overwrites `logits`, which are those of `true_logits`."""
    return -vocab_parallel_cross_entropy(logits, labels)  # type: ignore[no-any-return]


def from_last_stage(value: torch.Tensor) -> torch.Tensor:
    """The last pipeline stage's value of an equally shaped tensor, on every stage. Collective over the pipeline."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(value, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return value


def reduce_gradients(chunks: Sequence[GPTModel], *, experts: frozenset[str]) -> None:
    """Sums each parameter's gradient over the ranks that saw a different part of the batch or of its use.

    The loss is normalised by the global number of tokens, so sums (not means) are exact for every layout. Collective
    over all ranks. `experts` names the buffers (see `MegatronSource`) of the experts' matrices.
    """
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.grad is None:
                # An expert that no token chose; its replicas may have been chosen.
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            expert = f"{index}.{name}" in experts
            for group in _gradient_groups(parameter, name, expert=expert):
                if group.size() > 1:
                    dist.all_reduce(parameter.grad, group=group)


_NORMS_OF_HEADS = tuple(f"self_attention.{norm}.weight" for norm in ("q_layernorm", "k_layernorm", "out_norm"))


def _gradient_groups(parameter: nn.Parameter, name: str, *, expert: bool) -> Iterable[dist.ProcessGroup]:
    if expert:
        yield parallel_state.get_expert_data_parallel_group()
        return
    yield parallel_state.get_data_parallel_group(with_context_parallel=True)
    # Each TP rank sees its own part of the sequence, or only its own heads.
    partial = getattr(parameter, "sequence_parallel", False) or name.endswith(_NORMS_OF_HEADS)
    if partial:
        yield parallel_state.get_tensor_model_parallel_group()
    if getattr(parameter, "shared_embedding", False) and parallel_state.is_rank_in_embedding_group():
        yield parallel_state.get_embedding_group()
