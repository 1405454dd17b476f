"""The critic of PPO: the policy's trunk with a scalar value head, on Megatron ranks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from refit_transport.cluster.rl_training import RLTrainingWorker
from refit_transport.cluster.training import Precision
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece
from refit_transport.rl.policy_loss import loss_counts
from refit_transport.rl.settings import ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch
from refit_transport.rl.value_loss import ValueMetrics

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

VALUE_HEAD = "value_head.weight"

# How many sums `value_loss` has.
_SUMS = 6


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """What one update of the critic was; `grad_norm` is the gradient's global norm before clipping."""

    loss: ValueMetrics
    grad_norm: float
    tokens: float


class CriticWorker(RLTrainingWorker):
    """One rank of a critic, built from a policy's checkpoint: its vocabulary head makes way for a value head.

    The head `[1, hidden]` is fp32 in any precision and begins at zero: so do the values. Only the last pipeline
    stage has it.
    """

    role: ClassVar[str] = "critic"

    def _model_chunks(self, *, dtype: torch.dtype, vocab: int) -> Sequence[MegatronModule]:
        chunks = super()._model_chunks(dtype=dtype, vocab=vocab)
        self._is_last = any(chunk.post_process for chunk in chunks)
        for chunk in chunks:
            _drop_vocabulary_head(chunk)
        return chunks

    def _build(self, precision: Precision, divisible_by: int, timeout_s: float) -> None:
        super()._build(precision, divisible_by, timeout_s)
        shape = (1, int(self._chunks[0].config.hidden_size))
        self._head = nn.Parameter(torch.zeros(shape, device=self._device))
        if self._is_last:
            self._parameters[VALUE_HEAD] = self._head
            self._shapes[VALUE_HEAD] = shape
            self._pieces += (Piece(VALUE_HEAD, Box.full(shape), VALUE_HEAD, 0, (shape[1], 1)),)

    def _reduce_gradients(self) -> None:
        from megatron.core import parallel_state

        super()._reduce_gradients()
        if self._head.grad is not None:
            # Tensor-parallel ranks compute the same values, each from all hidden states.
            dist.all_reduce(self._head.grad, group=parallel_state.get_data_parallel_group(with_context_parallel=True))

    def values_of(self, batch: TrainBatch) -> torch.Tensor | None:
        """The value of the state before each predicted token, fp32 `[batch, length]` on rank 0, None elsewhere."""
        from refit_transport.cluster.rl_step import read_values

        return self._score(batch, read_values(self._head))

    def rl_step(self, batch: TrainBatch, settings: ValueLossSettings) -> CriticUpdate:
        """One update on all rows of the batch; every rank returns the same.

        Raises:
            ValueError: no token counts, or the batch lacks a column that the settings need.
            WorkerError: the gradient isn't finite; the weights are as before.
        """
        from refit_transport.cluster import rl_step

        counts = loss_counts(batch)
        sums = torch.zeros(_SUMS, dtype=torch.float64, device=self._device)
        norm = self._update(batch, rl_step.read_value_loss(self._head, settings, counts, sums))
        return CriticUpdate(ValueMetrics.from_sums(rl_step.add_up(sums)), norm, counts.tokens)


def _drop_vocabulary_head(chunk: MegatronModule) -> None:
    """Makes a model chunk return its last hidden states; the embedding is tied to nothing any more."""
    if chunk.post_process:
        del chunk.output_layer
        # Megatron asks this only about the head; the decoder keeps its last norm.
        chunk.post_process = False
    chunk.share_embeddings_and_output_weights = False
    for parameter in chunk.parameters():
        if hasattr(parameter, "shared_embedding"):
            del parameter.shared_embedding
