"""Cases of other systems' users that have no better place; docs/reliability.md lists all cases with their tests."""

import threading
import time

import pytest
import torch

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import RefitTransportError, VersionError
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate
from refit_transport.session import RefitSession
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.testing.threads import run_ranks

SHAPE = (64, 48)
NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
# Two pipeline stages of two layers; two targets that have everything, the second behind the first.
DOMAINS = ((0, 1), (2,), (3,))
SMALL = RefitSettings(coverage="all", fabric="gloo", domains=DOMAINS, bucket_bytes=512, staging_bytes=4096)


class Job:
    """Two sources and two targets as threads; `values` fills the full tensors of a version."""

    def __init__(self, settings=SMALL, values=None):
        self.settings = settings
        self.values = values or (lambda version: self.coordinates(version))
        stages = [
            manifest_from_layouts(
                "source",
                {name: Layout(SHAPE, Mesh.of(first_rank=stage, dp=1), (Replicate(),)) for name in names},
                dtype="bfloat16",
            )
            for stage, names in enumerate((NAMES[:2], NAMES[2:]))
        ]
        self.source = HeldSide.of(Manifest.of(rank for stage in stages for rank in stage.ranks))
        wide = {name: Layout(SHAPE, Mesh.of(first_rank=2, dp=2), (Replicate(),)) for name in NAMES}
        self.target = HeldSide.of(manifest_from_layouts("target", wide, dtype="bfloat16"))

    def coordinates(self, version):
        return {name: coordinate_tensor(name, SHAPE, "bfloat16", version=version) for name in NAMES}

    def fill(self, rank, version):
        if rank < 2:
            binding = self.source.bindings[rank]
            for index, piece in enumerate(binding.manifest.pieces):
                binding.view(index).copy_(self.values(version)[piece.tensor])

    def prepare(self, channel, **more):
        rank = channel.rank
        return RefitSession.prepare(
            channel,
            settings=self.settings if rank == 0 else None,
            **({"source": HeldSource(self.source.bindings[rank])} if rank < 2 else {}),
            **({"target": HeldTarget(self.target.bindings[rank])} if rank > 1 else {}),
            **more,
        )


def test_ranks_join_in_any_order():
    job, seconds = Job(), {}

    def main(channel):
        # Sources by rank, targets the other way round.
        time.sleep({0: 0.0, 1: 0.3, 2: 0.6, 3: 0.1}[channel.rank])
        began = time.monotonic()
        job.fill(channel.rank, 1)
        session = job.prepare(channel)
        session.run(1)
        session.close()
        seconds[channel.rank] = time.monotonic() - began

    run_ranks(4, main)
    assert max(seconds.values()) < 5.0
    assert not job.target.differences(job.values(1))


@pytest.mark.parametrize("late", [0, 3])
def test_nobody_runs_ahead_of_a_rank_that_is_busy(late):
    job, came, moved = Job(), [], []

    def main(channel):
        session = job.prepare(channel)
        job.fill(channel.rank, 1)
        run = session._fabric.run

        def noted(program, *, deadline):
            moved.append(time.monotonic())
            return run(program, deadline=deadline)

        session._fabric.run = noted
        session.begin()
        if channel.rank == late:
            time.sleep(0.5)
            came.append(time.monotonic())
        session.transfer(1)
        session.finish()
        session.close()

    run_ranks(4, main)
    assert len(moved) == 4
    assert min(moved) >= came[0]


def test_a_late_ranks_time_is_not_taken_from_the_transfer():
    job, left = Job(RefitSettings(**{**SMALL.to_json(), "domains": DOMAINS, "timeout_s": 2.0, "routes": ()})), []

    def main(channel):
        session = job.prepare(channel)
        job.fill(channel.rank, 1)
        run = session._fabric.run

        def noted(program, *, deadline):
            left.append(deadline.remaining())
            return run(program, deadline=deadline)

        session._fabric.run = noted
        session.begin()
        if channel.rank == 3:
            time.sleep(1.2)
        session.transfer(1)
        session.finish()
        session.close()

    run_ranks(4, main)
    assert min(left) > 1.5


def test_a_rank_that_comes_too_late_finds_nothing_in_flight():
    job = Job(RefitSettings(**{**SMALL.to_json(), "domains": DOMAINS, "timeout_s": 1.0, "routes": ()}))

    def main(channel):
        session = job.prepare(channel)
        job.fill(channel.rank, 1)
        session.begin()
        if channel.rank == 2:
            time.sleep(2.5)
        with pytest.raises(RefitTransportError, match=r"no answer from rank 2 .*in phase agree/the weight version"):
            session.transfer(1)
        session.close()

    run_ranks(4, main)
    assert all(bool((buffer == 255).all()) for b in job.target.bindings.values() for buffer in b.buffers.values())


def test_values_change_between_refits_with_payloads_smaller_than_a_tensor():
    job, wrong = Job(), []
    barrier = threading.Barrier(4, timeout=30.0)

    def main(channel):
        session = job.prepare(channel)
        for version in (1, 2, 3):
            job.fill(channel.rank, version)
            session.run(version)
            if channel.rank == 0:
                wrong.extend(job.target.differences(job.values(version)))
            barrier.wait()
        session.close()

    run_ranks(4, main)
    assert wrong == []


def test_a_payload_of_zeros_arrives_to_its_ends_at_every_hop():
    job = Job(values=lambda version: {name: torch.zeros(SHAPE, dtype=torch.bfloat16) for name in NAMES})

    def main(channel):
        job.fill(channel.rank, 1)
        session = job.prepare(channel)
        session.run(1)
        session.close()

    run_ranks(4, main)
    for binding in job.target.bindings.values():
        for index in range(len(binding.manifest.pieces)):
            data = binding.view(index).reshape(-1).view(torch.uint8)
            assert data[:16].tolist() == [0] * 16
            assert data[-16:].tolist() == [0] * 16
    # What lies behind the last piece is nobody's to write.
    assert not job.target.strays()


def test_a_refit_whose_acknowledgement_was_lost_is_applied_once():
    job, applied = Job(), []

    def main(channel):
        session = job.prepare(channel)
        job.fill(channel.rank, 1)
        session.run(1)  # the answer to this is lost: the caller doesn't know, and asks again
        job.fill(channel.rank, 2)
        with pytest.raises(VersionError, match="1 refused: it must be larger than the last one, 1"):
            session.run(1)
        applied.append(session.version)
        session.close()

    run_ranks(4, main)
    assert applied == [1] * 4
    assert not job.target.differences(job.values(1))


def test_other_settings_are_refused_and_named():
    job = Job()

    def main(channel):
        own = {"settings": RefitSettings(coverage="ffn", fabric="gloo", domains=DOMAINS)} if channel.rank == 3 else {}
        with pytest.raises(
            RefitTransportError, match=r"the setting coverage: 'all' on rank \[0\]; 'ffn' on rank \[3\]"
        ):
            RefitSession.prepare(
                channel,
                **({"settings": job.settings} if channel.rank == 0 else own),
                **({"source": HeldSource(job.source.bindings[channel.rank])} if channel.rank < 2 else {}),
                **({"target": HeldTarget(job.target.bindings[channel.rank])} if channel.rank > 1 else {}),
            )

    run_ranks(4, main)
