"""What a training worker does with narrow weights, drifted replicas, absent peers and bad batches."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from megatron_checks import assert_same, check_weights
from megatron_models import checkpoint_tensors, make_checkpoint, sequences
from megatron_ranks import hang, narrow_weights, tamper, uneven_deal
from rank_pool import RankPool, free_port
from small_models import qwen

from refit_transport.cluster.training import TrainingWorker
from refit_transport.errors import WorkerError
from refit_transport.layout.parallelism import MegatronParallelism

MODEL = qwen(vocab=256)


@pytest.mark.e2e
def test_bfloat16_weights_are_the_rounded_checkpoint_and_train(tmp_path: Path, two_ranks: RankPool) -> None:
    folder = make_checkpoint(tmp_path)
    batch = sequences(vocab=256, lengths=(12, 12), seed=5)
    outcomes = two_ranks.run(narrow_weights, checkpoint=folder, batch=batch)
    tensors = check_weights(outcomes, MODEL, dtype="bfloat16")
    rounded = {name: value.bfloat16().float().numpy() for name, value in checkpoint_tensors(folder).items()}
    assert_same(tensors["loaded"], rounded)
    # Steps this small vanish in bfloat16 unless the optimizer keeps wider weights.
    assert outcomes[0].losses[-1] < outcomes[0].losses[0] - 0.05
    # Training goes on from the perturbed weights, not from the optimizer's copies of the old ones.
    name = "model.layers.2.mlp.up_proj.weight"
    assert abs(tensors["trained again"][name] - tensors["perturbed"][name]).max() < 1e-3
    assert abs(tensors["trained"][name] - tensors["perturbed"][name]).max() > 1e-2
    for stage in "AB":
        assert_same(tensors[f"{stage} again"], tensors[stage])
    assert_same(tensors["A"], tensors["loaded"])
    assert all((tensors["A"][name] != tensors["B"][name]).mean() > 0.5 for name in tensors["A"])


@pytest.mark.e2e
@pytest.mark.parametrize("tensor", [1, 2])
def test_replicas_that_drifted_are_named(tmp_path: Path, request: pytest.FixtureRequest, tensor: int) -> None:
    pool: RankPool = request.getfixturevalue("two_ranks" if tensor == 1 else "four_ranks")
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    said = pool.run(tamper, checkpoint=folder, parallelism=MegatronParallelism(tensor, pipeline=2))
    for message in said:
        assert "model.embed_tokens.weight" in message
        assert ("rank [0]" if tensor == 1 else "rank [1]") in message


@pytest.mark.e2e
def test_a_peer_that_does_not_come_ends_the_step_in_time(tmp_path: Path, two_ranks: RankPool) -> None:
    message, seconds = two_ranks.run(hang, checkpoint=make_checkpoint(tmp_path), patience_s=6.0)[0]
    assert message
    assert 4 < seconds < 9


@pytest.mark.e2e
def test_sequences_that_cannot_be_dealt_are_refused(tmp_path: Path, two_ranks: RankPool) -> None:
    said = two_ranks.run(uneven_deal, checkpoint=make_checkpoint(tmp_path))
    assert all("3 sequences can't be dealt evenly to 2 data-parallel ranks" in message for message in said)


def _alone(folder: Path, port: int) -> None:
    TrainingWorker(
        rank=0,
        world_size=2,
        init_method=f"tcp://127.0.0.1:{port}",
        checkpoint=str(folder),
        parallelism=MegatronParallelism(),
        timeout_s=2,
    )


@pytest.mark.e2e
def test_absent_ranks_and_a_busy_port_are_one_clear_error(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 0.*rendezvous.*2 ranks"):
        _alone(folder, free_port())
    assert time.monotonic() - begin < 20
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(WorkerError, match="rendezvous"):
            _alone(folder, busy.getsockname()[1])
