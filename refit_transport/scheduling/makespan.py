"""The time model: how long a schedule takes when every NIC and local link works off its hops in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refit_transport.planning.plan import Ints
from refit_transport.scheduling.schedule import Schedule
from refit_transport.scheduling.topology import Topology


@dataclass(frozen=True, slots=True)
class Makespan:
    """The model's verdict: seconds until the last hop is done, and payload bytes by NIC, in the topology's order."""

    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]


def simulate(schedule: Schedule, topology: Topology) -> Makespan:
    """Runs a schedule in the time model.

    Each NIC, and each rank's local link, sends one hop after the other and receives one after the other, in the
    schedule's order and at its rate; what is sent before the receiver gets to it waits in the network. A hop begins
    when its parent is done. So the makespan is at least every NIC's bytes over its rate, hence at least `bound`, and
    exceeds them by pipelines that fill and by links that wait. Packing, latency and copies inside a rank cost nothing.

    >>> from refit_transport.layout.layout import Layout, manifest_from_layouts
    >>> from refit_transport.layout.mesh import Mesh
    >>> from refit_transport.layout.placement import Replicate
    >>> from refit_transport.planning.planner import plan_transfer
    >>> from refit_transport.scheduling.scheduler import build_schedule
    >>> source = manifest_from_layouts("source", {"w": Layout((100,), Mesh.of(dp=1), (Replicate(),))}, dtype="uint8")
    >>> both = Layout((100,), Mesh.of(first_rank=1, dp=2), (Replicate(),))
    >>> plan = plan_transfer(source, manifest_from_layouts("target", {"w": both}, dtype="uint8"))
    >>> topology = Topology.of(((0,), (1,), (2,)), nic_rate=100.0)
    >>> simulate(build_schedule(plan, topology, bucket_bytes=100, disabled=("forward",)), topology).seconds
    2.0
    """
    hops, nics = schedule.hops, len(topology.nics)
    nbytes = schedule.payloads.nbytes[hops.payload]
    ranks = np.unique(np.concatenate((hops.sender, hops.receiver)))
    nic_of = _table(ranks, [topology.nic(rank) for rank in ranks.tolist()])
    out, into = _links(hops.sender, hops.local, nic_of, nics), _links(hops.receiver, hops.local, nic_of, nics)
    rates = [nic.rate for nic in topology.nics]
    seconds = _run(schedule, nbytes, out, into, rates, topology.local_rate)
    network = ~hops.local
    return Makespan(
        seconds,
        _by_nic(nic_of[hops.sender[network]], nbytes[network], nics),
        _by_nic(nic_of[hops.receiver[network]], nbytes[network], nics),
    )


def _run(schedule: Schedule, nbytes: Ints, out: Ints, into: Ints, rates: list[float], local_rate: float) -> float:
    """The end of the last hop, one hop after the other; links beyond the NICs are the ranks' local ones."""
    links = int(max(out.max(initial=0), into.max(initial=0))) + 1
    pace = rates + [local_rate] * max(0, links - len(rates))
    sends_until, receives_until = [0.0] * len(pace), [0.0] * len(pace)
    done: list[float] = []
    copies = (schedule.hops.sender == schedule.hops.receiver).tolist()
    columns = (schedule.hops.parent.tolist(), nbytes.tolist(), out.tolist(), into.tolist(), copies)
    for parent, size, sender, receiver, is_copy in zip(*columns, strict=True):
        if is_copy:
            done.append(0.0)
            continue
        begin = max(sends_until[sender], done[parent] if parent >= 0 else 0.0)
        sends_until[sender] = begin + size / pace[sender]
        receives_until[receiver] = max(begin, receives_until[receiver]) + size / pace[receiver]
        done.append(max(sends_until[sender], receives_until[receiver]))
    return max(done, default=0.0)


def _table(ranks: Ints, nics: list[int]) -> Ints:
    table = np.zeros(int(ranks.max(initial=0)) + 1, dtype=np.int64)
    table[ranks] = nics
    return table


def _links(ranks: Ints, local: np.typing.NDArray[np.bool_], nic_of: Ints, nics: int) -> Ints:
    """The link that each hop uses at these ranks: a NIC, or number `nics` + rank for the rank's local one."""
    return np.where(local, nics + ranks, nic_of[ranks])


def _by_nic(nic: Ints, nbytes: Ints, count: int) -> tuple[int, ...]:
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, nic, nbytes)
    return tuple(total.tolist())
