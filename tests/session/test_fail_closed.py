"""What must not be refitted ends every rank before a byte moves, with tensor, rank and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from small_models import qwen
from torch import nn

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import RefitTransportError
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.session import RefitSession
from refit_transport.sources.dtensor import source_of
from refit_transport.targets.module import DescribedTarget
from refit_transport.testing.threads import run_ranks

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.mapping import ShardedTensor

from refit_transport.sources.megatron import MegatronSource

MODEL = qwen(layers=2, hidden=8, vocab=12, head_dim=2, intermediate=6)
QKV = "decoder.layers.self_attention.linear_qkv.weight"
ATTENTION = "model.layers.1.self_attn"
UNTOUCHED = 255.0


class Chunk(nn.Module):
    """One of two ranks' rows of the fused QKV of layer 1, described as Megatron does it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8) + 1000 * rank)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
        self.key, self.rank = QKV, rank

    def sharded_state_dict(self, metadata: object) -> dict[str, ShardedTensor]:
        offsets = ((0, 1, 2), (1, self.rank, 2))
        return {"x": ShardedTensor.from_rank_offsets(self.key, self.weight, *offsets, prepend_axis_num=1)}


@dataclass
class Job:
    """Two training ranks and one target, which has all of layer 1's projections."""

    chunks: list[Chunk] = field(default_factory=lambda: [Chunk(0), Chunk(1)])
    wanted: dict[str, torch.Tensor] = field(
        default_factory=lambda: {
            f"{ATTENTION}.{name}_proj.weight": torch.full((rows, 8), UNTOUCHED)
            for name, rows in (("q", 8), ("k", 4), ("v", 4))
        }
    )
    target: Any = None

    def run(self) -> list[str]:
        """One refit; what each rank raises, or ""."""
        target = self.target or DescribedTarget(source_of(self.wanted))
        settings = RefitSettings(coverage="all", verify="sample", timeout_s=20.0)

        def rank_main(channel: ControlChannel) -> str:
            try:
                session = RefitSession.prepare(
                    channel,
                    settings=settings if channel.rank == 0 else None,
                    source=MegatronSource([self.chunks[channel.rank]], MODEL) if channel.rank < 2 else None,
                    target=target if channel.rank == 2 else None,
                )
                session.run(1)
            except RefitTransportError as error:
                return str(error)
            return ""

        return run_ranks(3, rank_main)


class DescribesMore(DescribedTarget):
    """A target that needs a tensor of a layer that no source rank has, as an engine's loader would find."""

    def manifest(self, rank: int, tensors: Any) -> RankManifest:
        found = super().manifest(rank, tensors)
        spec = TensorSpec("model.layers.0.self_attn.q_proj.weight", (8, 8), "float32")
        piece = Piece(spec.name, Box.full(spec.shape), f"{ATTENTION}.q_proj.weight", 0, (8, 1))
        return RankManifest(rank, "target", (*found.tensors, spec), (*found.pieces, piece))


def _unexplained(job: Job) -> None:
    job.chunks[1].key = "decoder.layers.self_attention.linear_unheard_of.weight"


def _undescribed(job: Job) -> None:
    job.chunks[1].forgotten = nn.Parameter(torch.zeros(3))


def _nobody_fills(job: Job) -> None:
    job.wanted[f"{ATTENTION}.o_proj.weight"] = torch.full((8, 8), UNTOUCHED)


def _other_size(job: Job) -> None:
    job.wanted[f"{ATTENTION}.k_proj.weight"] = torch.full((6, 8), UNTOUCHED)


def _other_size_than_the_config(job: Job) -> None:
    job.chunks[1].weight.data = torch.zeros(10, 8)


def _flag_missing(job: Job) -> None:
    del job.chunks[1].weight.tensor_model_parallel


def _layer_on_no_stage(job: Job) -> None:
    job.target = DescribesMore(source_of(job.wanted))


def _hole(job: Job) -> None:
    job.chunks[1] = Chunk(0)


def _held_twice(job: Job) -> None:
    class Both(Chunk):
        """The rows of rank 0, in which one element differs, and those of rank 1."""

        def __init__(self) -> None:
            super().__init__(1)
            self.copy = nn.Parameter(Chunk(0).weight.detach().clone())
            self.copy.tensor_model_parallel, self.copy.partition_dim = True, 0
            self.copy.data[5, 3] += 1

        def sharded_state_dict(self, metadata: object) -> dict[str, ShardedTensor]:
            copy = ShardedTensor.from_rank_offsets(self.key, self.copy, (0, 1, 2), (1, 0, 2), prepend_axis_num=1)
            return {**super().sharded_state_dict(metadata), "y": copy}

    job.chunks[1] = Both()


FAULTS: dict[str, tuple[Callable[[Job], None], tuple[str, ...]]] = {
    "a parameter that no row explains": (
        _unexplained,
        ("linear_unheard_of.weight", "rank 1", "expected a Megatron key that the naming table explains for Qwen3"),
    ),
    "a parameter that the model doesn't describe": (
        _undescribed,
        ("tensor forgotten", "rank 1", "expected all 3 elements of the parameter in sharded_state_dict(), got 0"),
    ),
    "a target element that nobody fills": (
        _nobody_fills,
        (f"{ATTENTION}.o_proj.weight", "rank 2", "expected a tensor that the source has"),
    ),
    "sizes that disagree": (_other_size, (f"{ATTENTION}.k_proj.weight", "rank 2", "[4, 8]", "got [6, 8]")),
    "another size than the config's": (_other_size_than_the_config, (QKV, "rank 1", "expected", "[16, 8]", "[20, 8]")),
    "a shard that contradicts its flags": (
        _flag_missing,
        (QKV, "rank 1", "expected a parameter flagged as tensor-parallel in dim 0 (local 8 of 16)"),
    ),
    "a layer that no stage holds": (
        _layer_on_no_stage,
        ("model.layers.0.self_attn.q_proj.weight", "rank 2", "no source rank holds anything of model.layers.0"),
    ),
    "a hole between the shards": (
        _hole,
        (f"{ATTENTION}.k_proj.weight", "box [2:4, 0:8]", "target rank 2", "no source rank holds it"),
    ),
    "a tensor held twice with different values": (
        _held_twice,
        (f"{ATTENTION}.k_proj.weight", "box [0:2, 0:8]", "on rank [0]", "on rank [1]"),
    ),
}


def test_without_a_fault_everything_arrives() -> None:
    job = Job()
    assert job.run() == ["", "", ""]
    # Per query group: 2 query heads of 2 rows, one key and one value head. Two groups; each rank has one of them.
    first, second = (chunk.weight.detach() for chunk in job.chunks)
    for name, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8))):
        assert torch.equal(job.wanted[f"{ATTENTION}.{name}_proj.weight"], torch.cat([first[rows], second[rows]]))


@pytest.mark.parametrize("fault", FAULTS)
def test_it_ends_every_rank_before_a_byte_moves(fault: str) -> None:
    change, words = FAULTS[fault]
    job = Job()
    change(job)
    messages = job.run()
    for message in messages:
        assert all(word in message for word in words), messages
    assert all(bool((tensor == UNTOUCHED).all()) for tensor in job.wanted.values())
