"""What a Megatron rank does with a batch of samples: its rows as micro-batches, what it reads of the model, sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from refit_transport.cluster.megatron_step import MicroBatch, Read, from_last_stage, token_logprobs, true_logits
from refit_transport.rl.policy_loss import policy_loss
from refit_transport.rl.settings import LossCounts, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch
from refit_transport.rl.value_loss import value_loss


@dataclass(frozen=True, slots=True)
class RowBatch(MicroBatch):
    """A micro-batch with everything that is known of its rows, on the rank's device."""

    rows: TrainBatch


def deal(
    batch: TrainBatch, *, size: int, length_multiple: int, count_multiple: int, device: torch.device
) -> tuple[RowBatch, ...]:
    """This data-parallel rank's rows, every n-th one, in equally shaped micro-batches of `size` rows.

    The length is filled up to a multiple of `length_multiple`, and the rows so that all ranks have as many
    micro-batches, a multiple of `count_multiple`. What fills up doesn't count.
    """
    replicas = parallel_state.get_data_parallel_world_size()
    whole = batch.with_padding_rows(replicas * size * count_multiple)
    mine = whole.rows(slice(parallel_state.get_data_parallel_rank(), None, replicas))
    mine = _on(_lengthened(mine, length_multiple), device)
    parts = (mine.rows(slice(start, start + size)) for start in range(0, mine.size, size))
    return tuple(RowBatch(part.tokens, part.token_mask, part) for part in parts)


def gather_rows(parts: Sequence[torch.Tensor], batches: Sequence[RowBatch], *, device: torch.device) -> torch.Tensor:
    """The rows of all data-parallel ranks in their order before `deal`, with those that fill up, on every rank.

    `parts` are this rank's `[size, length]` numbers on the last pipeline stage, and nothing elsewhere. Collective.
    """
    shape = (sum(batch.rows.size for batch in batches), batches[0].rows.length)
    table = from_last_stage(torch.cat(list(parts)) if parts else torch.zeros(shape, device=device))
    group = parallel_state.get_data_parallel_group()
    everyone = [torch.empty_like(table) for _ in range(group.size())]
    dist.all_gather(everyone, table, group=group)
    return torch.stack(everyone, dim=1).flatten(0, 1)


def add_up(sums: torch.Tensor) -> torch.Tensor:
    """The sums that each last pipeline stage has of its rows, over all data-parallel ranks, on every rank."""
    sums = from_last_stage(sums)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from: over the true vocabulary, logits divided by `temperature`."""

    vocab: int
    temperature: float

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 logits of that distribution, for a rank's rows of the padded vocabulary."""
        return true_logits(logits if self.temperature == 1 else logits.float() / self.temperature, vocab=self.vocab)


def read_logprobs(sampling: Sampling) -> Read:
    """Reads the log-probability `[size, length]` of each token."""

    def read(logits: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        return token_logprobs(sampling.logits(logits), batch.tokens[:, 1:])

    return read


def read_policy_loss(settings: PolicyLossSettings, counts: LossCounts, sums: torch.Tensor, sampling: Sampling) -> Read:
    """Reads the policy loss; adds to `sums` those of `policy_loss`, and then the share in the mean entropy."""

    def read(logits: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        logits = sampling.logits(logits)
        entropy = vocabulary_entropy(logits.detach())
        found = policy_loss(token_logprobs(logits, batch.tokens[:, 1:]), batch.rows, settings, counts)
        sums[:-1] += found.sums
        sums[-1] += (entropy * batch.mask).double().sum() / counts.tokens
        return found.loss

    return read


def read_values(head: torch.Tensor) -> Read:
    """Reads a critic's values `[size, length]`: the last hidden states times the value head `[1, hidden]`, in fp32."""

    def read(hidden: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        if hidden.shape[0] != batch.rows.length:
            # Every rank then computes the same values from all of it, so the gradient is only to be cut again.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden.float(), head)[..., 0].transpose(0, 1)

    return read


def read_value_loss(head: torch.Tensor, settings: ValueLossSettings, counts: LossCounts, sums: torch.Tensor) -> Read:
    """Reads the value loss; adds those of `value_loss` to `sums`."""
    values = read_values(head)

    def read(hidden: torch.Tensor, batch: RowBatch) -> torch.Tensor:
        found = value_loss(values(hidden, batch), batch.rows, settings, counts)
        sums.add_(found.sums)
        return found.loss

    return read


def vocabulary_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy (nats) `[size, length]` of the softmax over all tensor-parallel ranks' logits, those of `true_logits`."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[..., None]
    weights = shifted.exp()
    # H = log Z - sum(p * x), with x the shifted logits and Z the sum of their exponentials.
    parts = torch.stack((weights.sum(dim=-1), (weights * shifted).sum(dim=-1)))
    dist.all_reduce(parts, group=group)
    return parts[0].log() - parts[1] / parts[0]


def _lengthened(batch: TrainBatch, multiple: int) -> TrainBatch:
    """The batch with columns that don't count appended, until its length is a multiple of `multiple`."""
    missing = -batch.length % multiple
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "sample_mask"}
    pad = torch.nn.functional.pad
    return replace(batch, **{name: pad(each, (0, missing)) for name, each in columns.items() if each is not None})


def _on(batch: TrainBatch, device: torch.device) -> TrainBatch:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: column.to(device) for name, column in columns.items() if column is not None})
