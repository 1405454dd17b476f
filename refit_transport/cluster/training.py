"""A Megatron training rank as a plain class: one process each; Ray (or a test) wraps it.

Megatron is imported when a worker starts, not with this module, so that a driver can name the class cheaply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.distributed as dist

from refit_transport.cluster import training_checkpoint
from refit_transport.cluster.gradients import GradientNorm
from refit_transport.cluster.optimizer import Optimizer, OptimizerSettings
from refit_transport.cluster.training_checkpoint import Block, Header
from refit_transport.compatibility import require
from refit_transport.config.checkpoint_config import read_config
from refit_transport.errors import AgreementError, WorkerError
from refit_transport.layout.manifest import Piece
from refit_transport.layout.parallelism import MegatronParallelism, padded_vocab, require_fit
from refit_transport.layout.presets.facts import Facts
from refit_transport.layout.presets.megatron import training_misfits
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.views import piece_view

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from refit_transport.cluster.megatron_step import MicroBatch
    from refit_transport.sources.megatron import MegatronSource

Precision = Literal["float32", "bfloat16"]


class TrainingWorker:
    """One rank of a Megatron policy, built from a checkpoint folder and ready to train.

    Every method but `source` is collective: all ranks call it with the same arguments. `timeout_s` (seconds) bounds
    each collective. `make_vocab_size_divisible_by` pads the vocabulary to a multiple of itself times the tensor size.
    Gradients whose global norm exceeds `max_grad_norm` are scaled down to it.
    """

    role: ClassVar[str] = "policy"

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        init_method: str,
        checkpoint: str,
        parallelism: MegatronParallelism,
        precision: Precision = "float32",
        learning_rate: float = 1e-4,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        max_grad_norm: float | None = None,
        micro_batch_size: int = 1,
        make_vocab_size_divisible_by: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        """Joins the group, builds the model and loads the checkpoint.

        Raises:
            ConfigError: the checkpoint can't be read or isn't supported, or the parallelism doesn't fit the model.
            LayoutError: model, config and checkpoint disagree.
            WorkerError: the ranks didn't find each other within the timeout.
            ValueError: an optimizer setting is out of its range.
            MissingDependencyError, UnsupportedVersionError: there is no Megatron-core, or none that is supported.
        """
        require("megatron-core", needed_for="a training worker")
        self._settings = OptimizerSettings(learning_rate, weight_decay, adam_betas, adam_eps, max_grad_norm)
        self._folder = Path(checkpoint)
        self._facts = Facts(read_config(self._folder), str(self._folder / "config.json"))
        self._model = LogicalModel.from_config(self._facts.config, source=self._facts.source)
        require_fit(training_misfits(self._model, parallelism, world_size=world_size))
        self.rank = rank
        self._cut = parallelism
        self._micro_batch_size = micro_batch_size
        self._device = _join(rank=rank, world_size=world_size, init_method=init_method, timeout_s=timeout_s)
        try:
            self._build(precision, make_vocab_size_divisible_by, timeout_s)
            self._optimizer = Optimizer(self._parameters, self._settings)
            self._gradient_norm = GradientNorm(self._parameters, self._pieces)
        except BaseException:
            self.shutdown()
            raise

    def _build(self, precision: Precision, divisible_by: int, timeout_s: float) -> None:
        from refit_transport.cluster import megatron_cpu, megatron_model
        from refit_transport.sources.megatron import MegatronSource

        megatron_cpu.apply()
        megatron_model.initialize_parallel_state(self._cut, timeout_s=timeout_s)
        dtype: torch.dtype = getattr(torch, precision)
        vocab = padded_vocab(self._model.vocab, divisible_by=divisible_by, tensor=self._cut.tensor)
        chunks = self._model_chunks(dtype=dtype, vocab=vocab)
        # Torch's norms come in fp32; Megatron's own wrapper casts the whole model too.
        self._chunks = tuple(chunk.to(self._device, dtype) for chunk in chunks)
        megatron_model.keep_router_biases_wide(self._chunks)
        self._source = MegatronSource(self._chunks, self._model)
        megatron_model.load_checkpoint(self._chunks, self._source, self._folder, rank=self.rank)
        experts = {tensor.name for tensor in self._model.main if tensor.row.experts}
        manifest = self._source.manifest(self.rank)
        self._shapes = {spec.name: spec.shape for spec in manifest.tensors}
        # Where each box lies as the optimizer sees it; what a refit sends may be a copy.
        self._pieces = tuple(replace(each, buffer=self._source.stored_in(each.buffer)) for each in manifest.pieces)
        self._experts = frozenset(piece.buffer for piece in self._pieces if piece.tensor in experts)
        self._parameters = {
            f"{index}.{name}": parameter
            for index, chunk in enumerate(self._chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }

    def _model_chunks(self, *, dtype: torch.dtype, vocab: int) -> Sequence[MegatronModule]:
        from refit_transport.cluster import megatron_model

        megatron = megatron_model.transformer_config(self._facts, self._model, self._cut, dtype=dtype)
        return megatron_model.build_chunks(self._facts, self._model, megatron, vocab=vocab)

    def train_step(self, token_batch: Sequence[Sequence[int]]) -> float:
        """One AdamW step on a global batch of token sequences; returns the batch's mean next-token cross entropy.

        Data-parallel ranks take every n-th sequence. Sequences may differ in length: padding doesn't count.

        Raises:
            ValueError: a sequence is shorter than two tokens, or the sequences can't be dealt evenly to the
                data-parallel ranks.
        """
        from megatron.core import parallel_state

        from refit_transport.cluster import megatron_step as step

        replicas = parallel_state.get_data_parallel_world_size()
        if len(token_batch) % replicas:
            raise ValueError(f"{len(token_batch)} sequences can't be dealt evenly to {replicas} data-parallel ranks")
        length = max(len(sequence) for sequence in token_batch)
        predicted = sum(len(sequence) - 1 for sequence in token_batch)
        mine = token_batch[parallel_state.get_data_parallel_rank() :: replicas]
        batches = self._micro_batches(mine, size=self._micro_batch_size, length=length)

        def loss(logprobs: torch.Tensor, batch: step.MicroBatch) -> torch.Tensor:
            return -(logprobs * batch.mask.to(logprobs.device)).sum() / predicted

        self._optimizer.zero_grad()
        scores = step.run_schedule(self._chunks, batches, loss, vocab=self._model.vocab, device=self._device)
        self._apply_gradients()
        total = step.from_last_stage(sum(scores, torch.zeros((), device=self._device)))
        if replicas > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given the ones before it: `len(sequence) - 1` numbers per sequence.

        fp32 log-softmax over the true vocabulary; the same on every rank.
        """
        from refit_transport.cluster import megatron_step as step

        length, size = max(len(sequence) for sequence in sequences), min(self._micro_batch_size, len(sequences))
        batches = self._micro_batches(sequences, size=size, length=length)
        with torch.no_grad():
            scores = step.run_schedule(
                self._chunks, batches, lambda logprobs, _: logprobs, vocab=self._model.vocab, device=self._device
            )
            shape = (len(batches) * size, batches[0].mask.shape[1])
            table = torch.cat(scores) if scores else torch.zeros(shape, device=self._device)
            table = step.from_last_stage(table).cpu()
        return [row[: len(sequence) - 1].tolist() for row, sequence in zip(table, sequences, strict=False)]

    def perturb(self, seed: int) -> None:
        """Changes every weight by an amount that depends on `seed`, the tensor's name and the element's global place.

        So replicas stay equal, and no two experts, layers or shards stay alike.
        """
        from refit_transport.cluster.perturbation import perturb

        perturb(self._source, rank=self.rank, seed=seed)
        self._optimizer.weights_changed()

    def set_weights(self, seed: int | None) -> None:
        """The checkpoint's weights again, perturbed by `seed` unless it is None: the same seed, the same weights."""
        from refit_transport.cluster.megatron_model import load_checkpoint
        from refit_transport.cluster.perturbation import perturb

        load_checkpoint(self._chunks, self._source, self._folder, rank=self.rank)
        if seed is not None:
            perturb(self._source, rank=self.rank, seed=seed)
        self._optimizer.weights_changed()

    def check_replicas(self) -> None:
        """Proves that ranks that hold the same box of a tensor hold the same bytes.

        Raises:
            AgreementError: they don't; names the tensor, the box and who holds what.
        """
        from refit_transport.cluster.perturbation import piece_digests

        everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, piece_digests(self._source, rank=self.rank))
        holders: dict[str, dict[str, list[int]]] = {}
        for rank, digests in enumerate(everyone):
            for box, digest in digests.items():
                holders.setdefault(box, {}).setdefault(digest, []).append(rank)
        for box, values in holders.items():
            if len(values) > 1:
                raise AgreementError(box, tuple((digest, tuple(ranks)) for digest, ranks in values.items()))

    def save(self, folder: str) -> None:
        """Writes weights, optimizer and random number generators to a new folder that all ranks share.

        Raises:
            WorkerError: the folder exists or can't be written; then there is no folder of that name that isn't whole.
        """
        header = Header(self.role, self._optimizer.updates, dist.get_world_size())
        training_checkpoint.save(Path(folder), tuple(self._blocks()), header)

    def restore(self, folder: str) -> int:
        """Goes on from a folder that `save` wrote; returns how many updates it has behind it.

        Any parallel layout may have written it; under the same one the next steps are the same to the bit.

        Raises:
            WorkerError: the folder is no whole checkpoint, or one of another model.
        """
        header = training_checkpoint.restore(Path(folder), tuple(self._blocks()), role=self.role)
        self._optimizer.restored(header.updates)
        return header.updates

    def _blocks(self) -> Iterator[Block]:
        """The live boxes of everything that a checkpoint holds: fp32 weights, AdamW's moments, the model's buffers."""
        for kind, tensors in self._optimizer.state().items():
            for piece in self._pieces:
                if piece.buffer in tensors:
                    yield self._block(kind, piece, tensors)
        buffers = {name: live for name, live in self._source.buffers().items() if name not in self._parameters}
        for piece in self._pieces:
            if piece.buffer in buffers:
                yield self._block("buffer", piece, buffers)

    def _block(self, kind: str, piece: Piece, tensors: Mapping[str, torch.Tensor]) -> Block:
        offset = tuple(span.start for span in piece.box.spans)
        return Block(f"{kind}/{piece.tensor}", self._shapes[piece.tensor], offset, piece_view(piece, tensors))

    def source(self) -> MegatronSource:
        """This rank's refit source. Not collective."""
        return self._source

    def shutdown(self) -> None:
        """Leaves every process group; the process may build another worker afterwards. Idempotent."""
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _apply_gradients(self) -> float:
        """Reduces the gradients, clips them and updates the weights; the norm before clipping. Collective.

        Raises:
            WorkerError: the norm isn't finite; no weight has changed then, on any rank.
        """
        self._reduce_gradients()
        norm = self._gradient_norm.measure()
        if not norm.isfinite():
            reason = (
                f"the gradient's norm is {float(norm)} after {self._optimizer.updates} updates: no weight was changed"
            )
            raise WorkerError("training", self.rank, "update", reason)
        if self._settings.max_grad_norm is not None:
            self._gradient_norm.clip(norm, largest=self._settings.max_grad_norm)
        self._optimizer.step()
        return float(norm)

    def _reduce_gradients(self) -> None:
        from refit_transport.cluster.megatron_step import reduce_gradients

        reduce_gradients(self._chunks, experts=self._experts)

    def _micro_batches(self, sequences: Sequence[Sequence[int]], *, size: int, length: int) -> tuple[MicroBatch, ...]:
        from refit_transport.cluster.megatron_step import micro_batches

        return micro_batches(
            sequences,
            size=size,
            length=length,
            length_multiple=self._cut.tensor if self._cut.sequence_parallel else 1,
            count_multiple=self._cut.pipeline if self._cut.virtual_pipeline > 1 else 1,
        )


def _join(*, rank: int, world_size: int, init_method: str, timeout_s: float) -> torch.device:
    """Initialises torch.distributed; the device that this rank computes on.

    Raises:
        WorkerError: a rank didn't come in time, or the port is taken.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        cause = str(error).splitlines()[0]
        reason = f"no group of {world_size} ranks at {init_method} within {timeout_s:g} s (timeout_s): {cause}"
        raise WorkerError("training", rank, "rendezvous", reason) from error
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
