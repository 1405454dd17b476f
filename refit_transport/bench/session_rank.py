"""One rank's sessions in a benchmark, one for each variant: joined, refitted, and measured from inside."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass
from pathlib import Path

from refit_transport.config.settings import RefitSettings
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
from refit_transport.report import RankReport
from refit_transport.scheduling.schedule import Traffic, total_traffic
from refit_transport.session import RefitSession
from refit_transport.testing.sides import HeldSource, HeldTarget

_CONNECT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Ran:
    """One refit on one rank: when it began and ended (CLOCK_MONOTONIC, seconds) and the CPU seconds that it took.

    `ranks` are all ranks' own reports, on rank 0 only.
    """

    began: float
    ended: float
    cpu: float
    ranks: tuple[RankReport, ...] = ()


@dataclass(slots=True)
class Joined:
    """One variant's control channel and session on this rank."""

    channel: ControlChannel
    session: RefitSession | None = None
    version: int = 0


class SessionRank:
    """Every method is collective over all ranks but `open_channel`, `planned`, `trim` and `memory`."""

    def __init__(self, rank: int, *, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._joined: dict[str, Joined] = {}

    def open_channel(self, name: str, host: str, port: int) -> Meeting:
        """Rank 0 opens a variant's control channel (`port` 0: on any free one); how the others join it."""
        channel = ControlChannel.listen(host=host, port=port, world_size=self.world_size, timeout_s=_CONNECT_SECONDS)
        self._joined[name] = Joined(channel)
        return channel.meeting

    def join(self, name: str, meeting: Meeting, settings: RefitSettings, *, binding: Binding, node: str) -> float:
        """Prepares a variant's session over these weights; returns the seconds that it took."""
        began = time.monotonic()
        if name not in self._joined:
            channel = ControlChannel.join(
                meeting, rank=self.rank, world_size=self.world_size, timeout_s=_CONNECT_SECONDS
            )
            self._joined[name] = Joined(channel)
        is_source = binding.manifest.role == "source"
        self._joined[name].session = RefitSession.prepare(
            self._joined[name].channel,
            settings=settings if self.rank == 0 else None,
            source=HeldSource(binding) if is_source else None,
            target=None if is_source else HeldTarget(binding),
            node=node,
        )
        return time.monotonic() - began

    def planned(self, name: str) -> Traffic:
        """What the variant's schedules move at each refit."""
        return total_traffic(transport.traffic() for transport in self.session(name).plan.transports.values())

    def refit(self, name: str) -> Ran:
        """Refits once, and takes the times."""
        joined = self._joined[name]
        joined.version += 1
        cpu, began = time.process_time(), time.monotonic()
        report = self.session(name).run(joined.version)
        ended = time.monotonic()
        return Ran(began, ended, time.process_time() - cpu, () if report is None else report.ranks)

    def trim(self) -> None:
        """Gives freed memory back to the kernel: what a refit takes then shows, even where others had it before."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def memory(self) -> int:
        """Bytes of this process that hold data: its own pages, and its share of pages shared with others.

        A page that was shared by forking counts before and after it is written, so that writing it isn't growth.
        """
        fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(fields[name].split()[0]) for name in ("Anonymous", "Pss_Shmem")) * 1024

    def close(self) -> None:
        """Leaves all sessions."""
        for joined in self._joined.values():
            if joined.session is not None:
                joined.session.close()

    def session(self, name: str) -> RefitSession:
        """The variant's session, which has been joined."""
        session = self._joined[name].session
        assert session is not None
        return session

    def channel(self, name: str) -> ControlChannel:
        """The variant's control channel."""
        return self._joined[name].channel
