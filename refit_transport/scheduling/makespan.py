"""The time model: how long a schedule takes when every NIC and local link works off its hops in order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from refit_transport.planning.plan import Ints
from refit_transport.scheduling.schedule import Hops, Schedule
from refit_transport.scheduling.topology import Topology


@dataclass(frozen=True, slots=True)
class Makespan:
    """The model's verdict: seconds until the last hop is done, and payload bytes by NIC, in the topology's order."""

    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]


def simulate(schedule: Schedule, topology: Topology) -> Makespan:
    """Runs a schedule in the time model.

    Each NIC, and each rank's local link, sends one hop at a time: of those whose payload is there, the first in the
    schedule's order. It receives one at a time, in order of arrival. A hop is done when the slower of its two ends is,
    and what follows it can begin. So the makespan is at least every NIC's bytes over its rate, hence at least `bound`,
    and exceeds them by pipelines that fill and by links that wait. Packing, latency and local copies cost nothing.

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
    links = int(max(out.max(initial=0), into.max(initial=0))) + 1
    pace = [nic.rate for nic in topology.nics] + [topology.local_rate] * max(0, links - nics)
    seconds = _Play(schedule.hops, nbytes, out, into, pace).run()
    network = ~hops.local
    return Makespan(
        seconds,
        _by_nic(nic_of[hops.sender[network]], nbytes[network], nics),
        _by_nic(nic_of[hops.receiver[network]], nbytes[network], nics),
    )


class _Play:
    """Events in order of time: a hop's payload is there, or a link can send again. Links beyond the NICs are local."""

    def __init__(self, hops: Hops, nbytes: Ints, out: Ints, into: Ints, pace: list[float]) -> None:
        self._out, self._into, self._pace = out.tolist(), into.tolist(), pace
        self._size = np.where(hops.sender == hops.receiver, 0, nbytes).tolist()
        self._parent = hops.parent.tolist()
        self._children: dict[int, list[int]] = {}
        self._waiting: list[list[int]] = [[] for _ in pace]
        for hop, parent in enumerate(self._parent):
            if parent >= 0:
                self._children.setdefault(parent, []).append(hop)
            else:
                self._waiting[self._out[hop]].append(hop)
        self._busy = [False] * len(pace)
        self._receives_until = [0.0] * len(pace)
        # (time, hop): the hop's payload is there; (time, -1 - link): the link can send again.
        self._events: list[tuple[float, int]] = []
        self._end = 0.0

    def run(self) -> float:
        """The end of the last hop."""
        for link in range(len(self._pace)):
            self._send_next(link, 0.0)
        while self._events:
            now, what = heapq.heappop(self._events)
            link = -1 - what if what < 0 else self._out[what]
            if what < 0:
                self._busy[link] = False
            else:
                heapq.heappush(self._waiting[link], what)
            self._send_next(link, now)
        return self._end

    def _send_next(self, link: int, now: float) -> None:
        if self._busy[link] or not self._waiting[link]:
            return
        hop = heapq.heappop(self._waiting[link])
        receiver, size = self._into[hop], self._size[hop]
        sent = now + size / self._pace[link]
        self._receives_until[receiver] = max(now, self._receives_until[receiver]) + size / self._pace[receiver]
        done = max(sent, self._receives_until[receiver])
        self._end = max(self._end, done)
        self._busy[link] = True
        heapq.heappush(self._events, (sent, -1 - link))
        for child in self._children.get(hop, ()):
            heapq.heappush(self._events, (done, child))


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
