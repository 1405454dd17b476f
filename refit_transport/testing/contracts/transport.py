"""The suite for `transports.base.Transport`."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from refit_transport.config.settings import RefitSettings
from refit_transport.connect import connect_fabric
from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.contracts.ranks import (
    DOMAINS,
    SHAPES,
    SOURCES,
    WORLD,
    Weights,
    both_sides,
    check_silence_ends,
    follow,
)
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.testing.threads import run_ranks
from refit_transport.transports.base import Endpoint, Job, Transport

_RUN_S = 20.0
_NAMES = tuple(sorted(SHAPES))


class TransportContract:
    """A transport class on eight ranks, each a thread of this process, over gloo. Set `transport_class`."""

    transport_class: ClassVar[type[Transport]]

    def settings(self) -> RefitSettings:
        """The settings that every rank gets; small payloads, so that there are many."""
        return RefitSettings(coverage="all", bucket_bytes=64, staging_bytes=1024)

    def test_planning_is_the_same_on_every_rank(self) -> None:
        """Nothing but the job and the names decides: two instances have one digest, other tensors another one."""
        job = self._job()
        first, again = (self.transport_class(job, _NAMES).digest() for _ in range(2))
        assert first == again, f"the same job has the digests {first} and {again}: ranks would refuse each other's plan"
        fewer = self.transport_class(job, _NAMES[1:]).digest()
        assert fewer != first, "the digest doesn't depend on the tensors"

    def test_the_plan_proves_itself(self) -> None:
        """`check` finds nothing wrong, and what it plans has every element once."""
        transport = self.transport_class(self._job(), _NAMES)
        transport.check()
        volumes: Counter[str] = Counter()
        for leg in transport.legs():
            for atom in range(len(leg.plan)):
                volumes[leg.plan.name(atom)] += leg.plan.box(atom).numel
        target = both_sides(target_dtype="bfloat16")[1]
        for spec in target.tensors:
            found, expected = volumes[spec.name], spec.box.numel
            assert found == expected, f"legs() plans {found} of the {expected} elements of {spec.name}"

    def test_the_footprint_has_every_rank(self) -> None:
        """Each rank is told what it needs; slots are a part of it."""
        footprint = self.transport_class(self._job(), _NAMES).footprint()
        missing = set(range(WORLD)) - footprint.staging_bytes.keys()
        assert not missing, f"footprint().staging_bytes lacks the ranks {sorted(missing)}"

    def test_weights_follow_training(self) -> None:
        """Versions 1, 2 and 1 again are complete on every target when `run` returns, in every topology."""
        for domains in DOMAINS:
            self._delivers(domains, target_dtype="bfloat16")
        self._delivers(DOMAINS[1], target_dtype="float32")

    def test_what_is_reported_is_what_was_planned(self) -> None:
        """The bytes in `Spent` are those of `traffic()`, of every rank and run."""
        spent = self._delivers(DOMAINS[1], target_dtype="bfloat16")
        traffic = self.transport_class(self._job(), _NAMES).traffic()
        for rank, runs in enumerate(spent):
            planned = traffic.network_sent.get(rank, 0) + traffic.local_sent.get(rank, 0)
            found = [run.sent_bytes for run in runs]
            assert found == [planned] * len(runs), f"rank {rank} reports {found} bytes sent, traffic() says {planned}"

    def test_sources_are_left_as_they_are(self) -> None:
        """`run` only reads what a source holds."""
        job = self._job()
        weights = Weights(job.source, job.target)
        before = {r: {n: b.clone() for n, b in x.buffers.items()} for r, x in weights.held.bindings.items()}

        def rank_main(channel: ControlChannel) -> None:
            fabric, transport, endpoint = self._prepare(channel, job, weights)
            transport.run(endpoint, fabric, deadline=Deadline(_RUN_S))
            channel.agree("ran", "", deadline=Deadline(_RUN_S))
            fabric.close()

        run_ranks(WORLD, rank_main)
        for rank, binding in weights.held.bindings.items():
            changed = [n for n, b in binding.buffers.items() if not bool((b == before[rank][n]).all())]
            assert not changed, f"run() wrote into the source of rank {rank}: {changed}"

    def test_a_silent_rank_ends_the_run_by_the_deadline(self) -> None:
        """A rank that doesn't come is an error of this package, soon after the deadline: never a hang."""
        job = self._job(DOMAINS[0])
        weights = Weights(job.source, job.target)

        def prepare(channel: ControlChannel):  # type: ignore[no-untyped-def]
            fabric, transport, endpoint = self._prepare(channel, job, weights)
            return fabric, lambda deadline: transport.run(endpoint, fabric, deadline=deadline)

        # Which ranks rank 0 sends to is the transport's choice: one of the targets must notice, none may hang.
        transport = self.transport_class(job, _NAMES)
        schedules = [leg.schedule for leg in transport.legs() if leg.schedule is not None]
        waiting = sorted(
            {
                int(receiver)
                for schedule in schedules
                for sender, receiver in zip(schedule.hops.sender, schedule.hops.receiver, strict=True)
                if sender == 0 and receiver != 0
            }
        )
        check_silence_ends(prepare, needs_rank_0=waiting)

    def _job(self, domains: tuple[range, ...] = DOMAINS[1], *, target_dtype: str = "bfloat16") -> Job:
        return Job(*both_sides(target_dtype=target_dtype), Topology.of(domains), self.settings())

    def _prepare(self, channel: ControlChannel, job: Job, weights: Weights) -> tuple[Fabric, Transport, Endpoint]:
        transport = self.transport_class(job, _NAMES)
        fabric = connect_fabric(
            channel,
            job.topology,
            job.settings,
            slot_bytes=transport.footprint().slot_bytes,
            deadline=Deadline(_RUN_S),
        )
        rank = channel.rank
        if rank in SOURCES:
            held = weights.held.bindings[rank]
            return fabric, transport, Endpoint(rank, source=HeldSource(held), source_manifest=held.manifest)
        wanted = weights.wanted.bindings[rank]
        target = HeldTarget(wanted)
        return fabric, transport, Endpoint(rank, target=target, target_manifest=wanted.manifest)

    def _delivers(self, domains: tuple[range, ...], *, target_dtype: str) -> list[list[Spent]]:
        job = self._job(domains, target_dtype=target_dtype)
        weights = Weights(job.source, job.target)
        what = f"domains {[list(domain) for domain in domains]}, float32 to {target_dtype}"

        def rank_main(channel: ControlChannel) -> list[Spent]:
            fabric, transport, endpoint = self._prepare(channel, job, weights)
            spent: list[Spent] = []
            follow(
                weights,
                lambda *_: spent.append(transport.run(endpoint, fabric, deadline=Deadline(_RUN_S))),
                channel,
                what=what,
            )
            fabric.close()
            return spent

        return run_ranks(WORLD, rank_main)
