"""What each rank of the tests of reinforcement learning on Megatron runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_oracle

from refit_transport.layout.parallelism import MegatronParallelism
from refit_transport.rl.settings import ImportanceSettings, KlSettings, PolicyLossSettings, ValueLossSettings
from refit_transport.rl.trajectories import TrainBatch

POLICY_LOSS = PolicyLossSettings(
    ratio_clip_min=training_oracle.LOW,
    ratio_clip_max=training_oracle.HIGH,
    importance=ImportanceSettings("tis", maximum=training_oracle.TRUNCATE),
    kl=KlSettings(penalty=training_oracle.PENALTY, kl_type="k3", input_clamp=None, output_clamp=None),
)
VALUE_LOSS = ValueLossSettings(scale=training_oracle.VALUE_SCALE, cliprange=training_oracle.VALUE_CLIP)
OPTIMIZER = {
    "learning_rate": training_oracle.LEARNING_RATE,
    "weight_decay": training_oracle.WEIGHT_DECAY,
    "adam_betas": training_oracle.BETAS,
    "adam_eps": training_oracle.EPS,
    "max_grad_norm": training_oracle.CLIP,
    # Another one than where it learns.
    "score_batch_size": 3,
}


@dataclass
class Box:
    """A box of a logical tensor, and a copy of a rank's elements of it."""

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


@dataclass
class RankLearned:
    scores: list[Any] = field(default_factory=list)
    updates: list[Any] = field(default_factory=list)
    gradients: list[Box] = field(default_factory=list)
    state: list[Box] = field(default_factory=list)
    reference: list[Any] = field(default_factory=list)
    random: np.ndarray | None = None


def start(
    role: str, rank: int, world_size: int, port: int, checkpoint: Path, parallelism: MegatronParallelism, **options: Any
) -> Any:
    from refit_transport.cluster.critic import CriticWorker
    from refit_transport.cluster.rl_training import RLPolicyWorker

    own = {} if role == "critic" else {"temperature": training_oracle.TEMPERATURE}
    return (CriticWorker if role == "critic" else RLPolicyWorker)(
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        checkpoint=str(checkpoint),
        parallelism=parallelism,
        **{"timeout_s": 60.0, **OPTIMIZER, **own, **options},
    )


def update(worker: Any, batch: TrainBatch) -> Any:
    return worker.rl_step(batch, VALUE_LOSS if worker.role == "critic" else POLICY_LOSS)


def gradients(worker: Any) -> list[Box]:
    from refit_transport.views import piece_view

    tensors = {name: parameter.grad for name, parameter in worker._parameters.items()}
    return [
        Box(
            piece.tensor,
            worker._shapes[piece.tensor],
            tuple(span.start for span in piece.box.spans),
            piece_view(piece, tensors).clone().numpy(),
        )
        for piece in worker._pieces
        if piece.buffer in tensors
    ]


def state(worker: Any) -> list[Box]:
    """Everything that a checkpoint holds, and the weights as they are served."""
    found = [
        Box(block.key, block.shape, block.offset, block.elements.clone().float().numpy()) for block in worker._blocks()
    ]
    for number, (name, parameter) in enumerate(worker._parameters.items()):
        values = parameter.detach().clone().float().numpy()
        found.append(Box(f"rank {worker.rank} {number} {name}", values.shape, (0,) * values.ndim, values))
    return found


def learn(
    *,
    rank: int,
    world_size: int,
    port: int,
    role: str,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    batch: TrainBatch,
    steps: int,
    options: dict[str, Any],
) -> RankLearned:
    worker = start(role, rank, world_size, port, checkpoint, parallelism, **options)
    try:
        found = RankLearned()
        score = worker.values_of if role == "critic" else worker.logprobs_of
        if role == "policy":
            worker.freeze_reference()
        for _ in range(steps):
            found.scores.append(score(batch))
            found.updates.append(update(worker, batch))
        worker.check_replicas()
        found.gradients, found.state = gradients(worker), state(worker)
        if role == "policy":
            found.reference = [worker.reference_logprobs_of(batch), worker.logprobs_of(batch)]
            assert all(np.array_equal(a.values, b.values) for a, b in zip(found.state, state(worker), strict=True))
        return found
    finally:
        worker.shutdown()


def save_halfway(
    *,
    rank: int,
    world_size: int,
    port: int,
    role: str,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    batch: TrainBatch,
    folder: Path,
    options: dict[str, Any],
) -> list[RankLearned]:
    """Two updates, save, two more; what was saved and what came of it."""
    worker = start(role, rank, world_size, port, checkpoint, parallelism, **options)
    try:
        found = []
        torch.manual_seed(100 + rank)
        for half in range(2):
            updates = [update(worker, batch) for _ in range(2)]
            if half == 0:
                torch.rand(7)
                worker.save(str(folder))
            found.append(RankLearned(updates=updates, state=state(worker), random=torch.rand(5).numpy()))
        return found
    finally:
        worker.shutdown()


def resume(
    *,
    rank: int,
    world_size: int,
    port: int,
    role: str,
    checkpoint: Path,
    parallelism: MegatronParallelism,
    batch: TrainBatch,
    folder: Path,
    options: dict[str, Any],
) -> list[RankLearned]:
    """Fresh workers that go on from the folder; what they restored and what came of it."""
    torch.manual_seed(0)
    worker = start(role, rank, world_size, port, checkpoint, parallelism, **options)
    try:
        assert worker.restore(str(folder)) == 2
        worker.check_replicas()
        found = [RankLearned(state=state(worker), random=torch.rand(5).numpy())]
        updates = [update(worker, batch) for _ in range(2)]
        found.append(RankLearned(updates=updates, state=state(worker)))
        return found
    finally:
        worker.shutdown()


def refusals(
    *, rank: int, world_size: int, port: int, ports: list[int], checkpoint: Path, larger: Path, folder: Path
) -> dict[str, str]:
    """What a rank says in each situation in which there is nothing to go on from, or nowhere to save."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    from refit_transport.errors import WorkerError

    said: dict[str, str] = {}

    def attempt(situation: str, action: Any) -> None:
        try:
            action()
        except WorkerError as error:
            said[situation] = str(error)
        dist.barrier()

    cut = MegatronParallelism(2)
    write = FileSystemWriter.write_data

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    worker = start("policy", rank, world_size, port, checkpoint, cut, make_vocab_size_divisible_by=2)
    try:
        worker.train_step([[1, 2, 3], [4, 5, 6]])
        if rank == 1:
            FileSystemWriter.write_data = full  # type: ignore[method-assign, assignment]
        attempt("rank 1 can't write", lambda: worker.save(str(folder)))
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
        attempt("restore after the crash", lambda: worker.restore(str(folder)))
        worker.save(str(folder))
        attempt("save over it", lambda: worker.save(str(folder)))
        said["after a second attempt"] = f"{worker.restore(str(folder))} update"
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
        worker.shutdown()
    others = (("as a critic", "critic", checkpoint), ("into another model", "policy", larger))
    # A port of its own for each group: a rank that is late must not meet the one before.
    for (situation, role, model), other_port in zip(others, ports, strict=False):
        worker = start(role, rank, world_size, other_port, model, cut, make_vocab_size_divisible_by=2)
        try:
            attempt(situation, lambda: worker.restore(str(folder)))  # noqa: B023
        finally:
            worker.shutdown()
    worker = start("policy", rank, world_size, ports[-1], checkpoint, cut, make_vocab_size_divisible_by=2)
    try:
        if rank == 0:
            data = max(folder.glob("*.distcp"))
            data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        dist.barrier()
        attempt("with a damaged file", lambda: worker.restore(str(folder)))
        return said
    finally:
        worker.shutdown()
