"""Reinforcement learning on Megatron ranks: scoring batches of samples, and updates of the policy by its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from refit_transport.cluster.training import TrainingWorker
from refit_transport.errors import WorkerError
from refit_transport.rl.policy_loss import PolicyMetrics, loss_counts
from refit_transport.rl.settings import PolicyLossSettings
from refit_transport.rl.trajectories import TrainBatch

if TYPE_CHECKING:
    from refit_transport.cluster.megatron_step import Read
    from refit_transport.cluster.rl_step import RowBatch, Sampling


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What one update of the policy was: the loss's own metrics, and those of the model.

    `entropy` (nats) is the policy's before the update, exact over the vocabulary, a mean over the `tokens` that count;
    `grad_norm` the gradient's global norm before clipping.
    """

    loss: PolicyMetrics
    entropy: float
    grad_norm: float
    tokens: float
    samples: float


class RLTrainingWorker(TrainingWorker):
    """What policy and critic share. Every rank gets the whole batch, and takes its data-parallel rows itself.

    `score_batch_size` is the micro-batch where nothing is learned; None: as where it is.
    """

    def __init__(self, *, score_batch_size: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._score_batch_size = score_batch_size or self._micro_batch_size

    def _score(self, batch: TrainBatch, read: Read) -> torch.Tensor | None:
        """What `read` finds for every row, `[batch, length]` on the CPU; None but on rank 0."""
        from refit_transport.cluster import rl_step
        from refit_transport.cluster.megatron_step import run_model

        batches = self._deal(batch, size=self._score_batch_size)
        with torch.no_grad():
            found = run_model(self._chunks, batches, read, device=self._device)
            table = rl_step.gather_rows(found, batches, device=self._device)
        return table[: batch.size, : batch.length].cpu() if self.rank == 0 else None

    def _update(self, batch: TrainBatch, read: Read) -> float:
        """One optimizer step on the loss that `read` finds; the gradient's norm before clipping."""
        from refit_transport.cluster.megatron_step import run_model

        self._optimizer.zero_grad()
        run_model(self._chunks, self._deal(batch, size=self._micro_batch_size), read, device=self._device)
        return self._apply_gradients()

    def _deal(self, batch: TrainBatch, *, size: int) -> tuple[RowBatch, ...]:
        from refit_transport.cluster.rl_step import deal

        return deal(
            batch,
            size=size,
            length_multiple=self._cut.tensor if self._cut.sequence_parallel else 1,
            count_multiple=self._cut.pipeline if self._cut.virtual_pipeline > 1 else 1,
            device=self._device,
        )


class RLPolicyWorker(RLTrainingWorker):
    """A policy that learns from samples, and may keep a frozen copy of its weights as the reference.

    Its log-probabilities are those at the samplers' `temperature`.
    """

    def __init__(self, *, temperature: float = 1.0, **arguments: Any) -> None:
        if not temperature > 0:
            raise ValueError(f"the temperature must be positive (got {temperature})")
        super().__init__(**arguments)
        self._temperature = temperature
        self._reference: list[torch.Tensor] | None = None

    def logprobs_of(self, batch: TrainBatch) -> torch.Tensor | None:
        """fp32 log-probability of each predicted token, `[batch, length]` on rank 0, None elsewhere."""
        from refit_transport.cluster.rl_step import read_logprobs

        return self._score(batch, read_logprobs(self._sampling()))

    def rl_step(self, batch: TrainBatch, settings: PolicyLossSettings) -> PolicyUpdate:
        """One update on all rows of the batch; every rank returns the same.

        Means are over the whole batch, so the result depends on the layout and on micro-batches only by rounding.

        Raises:
            ValueError: no token counts, or the batch lacks a column that the settings need.
            WorkerError: the gradient isn't finite; the weights are as before.
        """
        from refit_transport.cluster import rl_step

        counts = loss_counts(batch)
        sums = torch.zeros(len(fields(PolicyMetrics)) + 1, dtype=torch.float64, device=self._device)
        norm = self._update(batch, rl_step.read_policy_loss(settings, counts, sums, self._sampling()))
        sums = rl_step.add_up(sums)
        metrics = PolicyMetrics.from_sums(sums[:-1])
        return PolicyUpdate(metrics, float(sums[-1]), norm, counts.tokens, counts.samples)

    def _sampling(self) -> Sampling:
        from refit_transport.cluster.rl_step import Sampling

        return Sampling(self._model.vocab, self._temperature)

    def freeze_reference(self) -> None:
        """Keeps a copy of the present weights as the reference policy, in place of an earlier one.

        A resumed job does it before `restore`, as the first one did before its first step: checkpoints don't hold it.
        """
        self._reference = [tensor.detach().clone() for tensor in self._tensors()]

    def reference_logprobs_of(self, batch: TrainBatch) -> torch.Tensor | None:
        """As `logprobs_of`, of the reference policy.

        Raises:
            WorkerError: there is none.
        """
        with self._reference_weights():
            return self.logprobs_of(batch)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise WorkerError("training", self.rank, "reference", "there is no reference policy; call freeze_reference")
        own = [tensor.data for tensor in self._tensors()]
        # The tensors look at other memory for a while; nothing is copied, and refits find their memory as it was.
        self._point_to(self._reference)
        try:
            yield
        finally:
            self._point_to(own)

    def _point_to(self, memory: list[torch.Tensor]) -> None:
        for tensor, data in zip(self._tensors(), memory, strict=True):
            tensor.data = data

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
