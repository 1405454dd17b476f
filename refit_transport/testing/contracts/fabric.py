"""The suite for `fabrics.base.Fabric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Program, lower
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.slots import SlotSizes
from refit_transport.planning.planner import plan_transfer
from refit_transport.scheduling.broadcast import ChainKind, build_broadcast
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.scheduler import PASSES, PassName, build_schedule
from refit_transport.scheduling.topology import NicKind, Topology
from refit_transport.testing.contracts.ranks import (
    DOMAINS,
    TARGETS,
    WORLD,
    Weights,
    both_sides,
    check_silence_ends,
    follow,
)
from refit_transport.testing.threads import run_ranks

_CONNECT_S = 20.0


class FabricContract:
    """A fabric on eight ranks, each a thread of this process. Fill in `connect`.

    A program may need as few as two slots, relays payloads, and has copies between local views beside the messages.
    """

    def connect(self, channel: ControlChannel, topology: Topology, *, slot_bytes: int, deadline: Deadline) -> Fabric:
        """Connects this rank, with slot memory of `slot_bytes` bytes; every rank of the channel calls it."""
        raise NotImplementedError

    def test_payloads_of_any_size_arrive(self) -> None:
        """Of a few bytes each, of odd sizes, and all in one; between ranks near and far, by every pass and by none."""
        for bucket_bytes in (16, 100, 1 << 20):
            for domains in DOMAINS:
                for disabled in ((), PASSES):
                    schedule = _resharding(domains, bucket_bytes, disabled=disabled)
                    self._delivers(schedule, domains, bucket_bytes=bucket_bytes)

    def test_chains_of_targets_arrive(self) -> None:
        """Each payload is passed on from rank to rank, along one chain or one for each NIC."""
        plan = plan_transfer(*both_sides(target_dtype="bfloat16"))
        for nics in get_args(NicKind):
            for chains in get_args(ChainKind):
                topology = Topology.of(DOMAINS[2], nics=nics)
                schedule = build_broadcast(plan, topology, chains=chains, bucket_bytes=100)
                self._delivers(schedule, DOMAINS[2], bucket_bytes=100)

    def test_what_is_reported_is_what_was_planned(self) -> None:
        """`Spent.sent_bytes` and `received_bytes` are the payload bytes of the schedule, of every rank and run."""
        schedule = _resharding(DOMAINS[1], 64)
        spent = self._delivers(schedule, DOMAINS[1], bucket_bytes=64)
        traffic = schedule.traffic()
        for rank, runs in enumerate(spent):
            sent = traffic.network_sent.get(rank, 0) + traffic.local_sent.get(rank, 0)
            found = [run.sent_bytes for run in runs]
            assert found == [sent] * len(runs), f"rank {rank} reports {found} bytes sent, the schedule has {sent}"
        received = sum(run.received_bytes for runs in spent for run in runs)
        sent = sum(run.sent_bytes for runs in spent for run in runs)
        assert received == sent, f"all ranks together report {sent} bytes sent and {received} received"

    def test_a_silent_rank_ends_the_run_by_the_deadline(self) -> None:
        """A rank that doesn't come is an error of this package, soon after the deadline: never a hang."""
        topology = Topology.of(DOMAINS[0])
        # Without the pass that balances senders, rank 0 sends to all.
        schedule = _resharding(DOMAINS[0], 64, disabled=("balance",))
        weights, sizes = Weights(*both_sides(target_dtype="bfloat16")), SlotSizes.of([schedule], staging_bytes=256)
        hops = schedule.hops
        waiting = sorted({int(r) for s, r in zip(hops.sender, hops.receiver, strict=True) if s == 0 and r in TARGETS})

        def prepare(channel: ControlChannel):  # type: ignore[no-untyped-def]
            fabric = self.connect(channel, topology, slot_bytes=sizes.nbytes, deadline=Deadline(_CONNECT_S))
            program = _program(schedule, weights, channel.rank, fabric, sizes)
            return fabric, lambda deadline: fabric.run(program, deadline=deadline)

        check_silence_ends(prepare, needs_rank_0=waiting)

    def _delivers(self, schedule: Schedule, domains: Sequence[range], *, bucket_bytes: int) -> list[list[Spent]]:
        weights = Weights(*both_sides(target_dtype="bfloat16"))
        sizes = SlotSizes.of([schedule], staging_bytes=4 * bucket_bytes)
        topology = Topology.of(domains)
        what = f"domains {[list(domain) for domain in domains]}, payloads of up to {bucket_bytes} bytes"

        def rank_main(channel: ControlChannel) -> list[Spent]:
            fabric = self.connect(channel, topology, slot_bytes=sizes.nbytes, deadline=Deadline(_CONNECT_S))
            program = _program(schedule, weights, channel.rank, fabric, sizes)
            spent: list[Spent] = []
            follow(
                weights,
                lambda *_: spent.append(fabric.run(program, deadline=Deadline(_CONNECT_S))),
                channel,
                what=what,
            )
            fabric.close()
            return spent

        return run_ranks(WORLD, rank_main)


def _resharding(domains: Sequence[range], bucket_bytes: int, *, disabled: tuple[PassName, ...] = ()) -> Schedule:
    plan = plan_transfer(*both_sides(target_dtype="bfloat16"))
    return build_schedule(plan, Topology.of(domains), bucket_bytes=bucket_bytes, disabled=disabled)


def _program(schedule: Schedule, weights: Weights, rank: int, fabric: Fabric, sizes: SlotSizes) -> Program:
    return lower(
        schedule,
        rank,
        source=weights.held.bindings.get(rank),
        target=weights.wanted.bindings.get(rank),
        memory=fabric.memory,
        sizes=sizes,
    )
