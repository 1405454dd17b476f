"""A small refit on eight ranks, threads of this process, that the suites of fabrics and transports run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from refit_transport.errors import RefitTransportError
from refit_transport.fabrics.base import Fabric
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.threads import run_ranks

WORLD = 8
SOURCES = range(4)
TARGETS = range(4, 8)
# Near each other: all ranks, each side's, pairs.
DOMAINS = ((range(8),), (range(4), range(4, 8)), (range(2), range(2, 4), range(4, 6), range(6, 8)))
# The first FFN, then others: dense, of one expert each, of one dim, and uneven over two ranks.
SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (12, 10),
    "model.layers.0.mlp.experts.down_proj.weight": (4, 6, 5),
    "model.layers.0.self_attn.o_proj.weight": (33, 6),
    "model.norm.weight": (7,),
}
DEADLINE_S = 2.0
_PATIENCE_S = 20.0
_LATE_S = 3.0


def tensors(version: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a version; no two versions agree anywhere."""
    return {name: coordinate_tensor(name, shape, "float32", version=version) for name, shape in SHAPES.items()}


def both_sides(*, target_dtype: str) -> tuple[Manifest, Manifest]:
    """Ranks 0 to 3 hold rows (two of two replicas), 4 to 7 need columns, in another dtype."""
    train, serve = Mesh.of(dp=2, tp=2), Mesh.of(first_rank=4, dp=2, tp=2)
    source = {name: Layout(shape, train, (Replicate(), Shard(0))) for name, shape in SHAPES.items()}
    target = {name: Layout(shape, serve, (Replicate(), Shard(len(shape) - 1))) for name, shape in SHAPES.items()}
    return (
        manifest_from_layouts("source", source, dtype="float32"),
        manifest_from_layouts("target", target, dtype=target_dtype),
    )


class Weights:
    """All ranks' buffers of both sides."""

    def __init__(self, source: Manifest, target: Manifest) -> None:
        self._source = source
        self.held, self.wanted = HeldSide.of(source, tensors(1)), HeldSide.of(target)
        self.fault = ""

    def train(self, version: int) -> None:
        """Gives the sources the values of a version, in place."""
        for rank, binding in HeldSide.of(self._source, tensors(version)).bindings.items():
            for name, buffer in binding.buffers.items():
                self.held.bindings[rank].buffers[name].copy_(buffer)

    def faults(self, version: int, *, what: str) -> str:
        """What is wrong where a target has something else, or a byte outside of its pieces was written, else ""."""
        wrong, strays = self.wanted.differences(tensors(version)), self.wanted.strays()
        if wrong:
            return f"{what}: after the run to version {version} these are wrong: {wrong}"
        return f"{what}: elements outside of all pieces were written: {strays}" if strays else ""


def follow(weights: Weights, run: Callable[[ControlChannel, int], None], channel: ControlChannel, *, what: str) -> None:
    """One rank's part in runs to versions 1, 2 and 1 again; rank 0 trains before and checks after each.

    All ranks stop at the first fault, which rank 0 raises as an AssertionError.
    """
    for number, version in enumerate((1, 2, 1)):
        if channel.rank == 0:
            weights.train(version)
        _meet(channel, f"trained/{number}")
        run(channel, number)
        _meet(channel, f"ran/{number}")
        if channel.rank == 0:
            weights.fault = weights.faults(version, what=what)
        _meet(channel, f"checked/{number}")
        if weights.fault:
            assert channel.rank, weights.fault
            return


def _meet(channel: ControlChannel, topic: str) -> None:
    channel.agree(topic, "", deadline=Deadline(_PATIENCE_S))


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a rank's run ended, and after how long, in seconds."""

    error: BaseException | None
    seconds: float


def check_silence_ends(
    prepare: Callable[[ControlChannel], tuple[Fabric, Callable[[Deadline], object]]], *, needs_rank_0: Sequence[int]
) -> None:
    """Rank 0 never runs: ranks that need its bytes must fail with our error soon after the deadline of their run.

    When that takes too long, rank 0 leaves the group, so that no rank waits for ever.
    """
    ended = threading.Barrier(WORLD)

    def rank_main(channel: ControlChannel) -> _Ended:
        fabric, run = prepare(channel)
        _meet(channel, "prepared")
        began, error = time.monotonic(), None
        try:
            if channel.rank:
                run(Deadline(DEADLINE_S))
        except BaseException as found:  # noqa: BLE001  # looked at below
            error = found
        seconds = time.monotonic() - began
        try:
            ended.wait(DEADLINE_S + 2 * _LATE_S)
        except threading.BrokenBarrierError:
            pass
        finally:
            fabric.close()
        return _Ended(error, seconds)

    try:
        results = run_ranks(WORLD, rank_main, timeout_s=3 * _PATIENCE_S)
    except TimeoutError as error:
        raise AssertionError(f"rank 0 sends nothing, and others wait for ever: {error}") from error
    for rank in needs_rank_0:
        result = results[rank]
        assert result.error is not None, f"rank 0 sends nothing, and rank {rank} needs its bytes but reports no error"
        assert isinstance(result.error, RefitTransportError), (
            f"rank {rank} fails with {type(result.error).__name__}, which isn't one of refit_transport's errors: "
            f"{result.error}"
        )
        assert result.seconds < DEADLINE_S + _LATE_S, (
            f"rank {rank} waited {result.seconds:.1f} s for rank 0, its deadline was {DEADLINE_S:g} s"
        )
