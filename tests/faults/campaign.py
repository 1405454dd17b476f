"""Strikes refits, and checks after every blow what a user relies on."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from faults.crew import ENDED, Crew
from faults.fault import GRACE_S, TIMEOUT_S, Fault, World
from faults.victim import HOST, Ended, Opening, Victim
from rank_pool import free_port

from refit_transport.bench.isolation import die_with_parent

# Whoever takes longer hangs.
_GIVE_UP_S = TIMEOUT_S + GRACE_S + 3.0
# A store that a rank hasn't come to stays, to tell it why the session failed; gloo connects for up to five timeouts.
_LINGER_S = 40.0
_MOST_SESSIONS = 3


@dataclass(slots=True)
class Injection:
    """One blow, and what came of it: `seconds` until the last survivor knew; `problems` must be none.

    `sessions` is how many were opened until one was exact: many processes on few cores don't always meet in time.
    """

    world: str
    commit: str
    kind: str
    victim: str
    point: str
    detected: bool = False
    named: bool = False
    recovered: bool = False
    sessions: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Campaign:
    """Strikes one job of this many ranks again and again. A context manager."""

    def __init__(self, world: World, *, namespaces: Any = None, host: str = HOST, folder: str = "") -> None:
        self.world, self._host = world, host
        self._namespaces, self._given = namespaces, folder
        self._version = 0
        self._opening = Opening(0, "", 0)
        self._incarnations = dict.fromkeys(range(world.size), 0)
        self._least: dict[int, Any] = {}
        self._neighbour: Campaign | None = None

    def __enter__(self) -> Campaign:
        # Sockets of other jobs on this machine are no concern of ours.
        self._outer = tempfile.tempdir
        self._folder = tempfile.TemporaryDirectory(prefix="faults-")
        tempfile.tempdir = self._given or self._folder.name
        self._before, self._others = _leavings(), _children()
        self.crew = Crew(self.world.size, lambda rank, tell: Victim(rank, self.world, tell), self._namespaces)
        self._recover()
        parts = self.crew.call("part")
        self._senders, self._forwarders = (
            [rank for rank in sorted(parts) if parts[rank] == part] for part in ("sends", "forwards")
        )
        self.crew.call("leave")
        self._least = self.crew.call("footprint", None, 0.0)
        self._recover()
        return self

    def __exit__(self, *_: object) -> None:
        if self._neighbour is not None:
            self._neighbour.__exit__()
        self.crew.__exit__()
        tempfile.tempdir = self._outer
        self._folder.cleanup()

    def strike(self, fault: Fault) -> Injection:
        """One injection, its checks, and the recovery."""
        found = Injection(self.world.name, self.world.commit, fault.kind, fault.victim, fault.point)
        try:
            self._strike(fault, found)
            found.sessions = self._recover()
            found.recovered = True
        except (RuntimeError, AssertionError, OSError) as error:
            found.problems.append(f"{type(error).__name__}: {error}")
        found.problems += self._left_behind(fault)
        return found

    def finish(self) -> list[str]:
        """What is left behind when everybody has left, after a store that waits for latecomers has given up."""
        self.crew.call("leave")
        return self._grown(_LINGER_S)

    def _strike(self, fault: Fault, found: Injection) -> None:
        special: dict[str, Callable[[Fault, Injection], None]] = {
            "port": self._port_taken,
            "two jobs": self._two_jobs,
            "zombie": self._zombie,
            "driver killed": self._driver,
            "driver stopped": self._driver,
            "repeated version": self._wrong_version,
            "older version": self._wrong_version,
            "another version": self._wrong_version,
        }
        special.get(fault.kind, self._harm)(fault, found)

    def _harm(self, fault: Fault, found: Injection) -> None:
        """A rank is struck while a session is opened, or while it refits."""
        victim, ranks = self._victim(fault), [*self.crew.pids]
        at_opening = fault.point in ("prepare", "connect") or fault.kind in (
            "settings", "schema", "plan", "another model",
        )  # fmt: skip
        self.crew.told.clear()
        began, version = time.monotonic(), self._version + 1
        if at_opening:
            self.crew.call("leave")
            self._send_open(fault, victim)
        else:
            for rank in ranks:
                self.crew.send("refit", version, fault if rank == victim else None, ranks=[rank])
        dies, stops = fault.kind == "kill", fault.kind in ("stop", "wake")
        survivors = [rank for rank in ranks if rank != victim or not (dies or stops)]
        ended = self.crew.gather([*survivors, *([victim] if dies else [])], timeout_s=_GIVE_UP_S)
        if stops and victim not in self.crew.told:
            # It tells before it stops, maybe after the others are done.
            self.crew.await_told(victim, timeout_s=TIMEOUT_S)
        struck = self.crew.told.get(victim, began)
        if victim not in self.crew.told and not at_opening:
            found.problems.append("the blow wasn't struck")
        found.seconds = self._judge(fault, found, {r: ended.get(r) for r in survivors}, victim, struck)
        self._check_served(found, survivors, version)
        if fault.kind == "wake":
            self._wake(found, victim)
        elif dies or stops or fault.kind == "reset peers":
            # gloo keeps the memory of connections that are broken off in its own process, as only this harness does.
            self._replace(victim)

    def _judge(
        self, fault: Fault, found: Injection, ended: Mapping[int, Ended | None], victim: int, struck: float
    ) -> float:
        """Whether all survivors said what they must, in time; the seconds until the last one did."""
        expected, last = fault.expected(self.world.commit), struck
        for rank, end in ended.items():
            if end is None or end is ENDED:
                found.problems.append(f"rank {rank} {'hangs' if end is None else 'ended'}")
                continue
            last = max(last, end.at)
            failed = bool(end.error)
            if failed != (expected == "all fail") and expected != "either":
                found.problems.append(f"rank {rank}: {end.error or 'no error'}; expected: {expected}")
            if failed and fault.is_named and rank != victim and f"rank {victim}" not in end.error:
                found.problems.append(f"rank {rank} doesn't name rank {victim}: {end.error}")
            if failed and end.error not in found.said:
                found.said.append(end.error)
        found.named = victim < 0 or all(
            f"rank {victim}" in said or f"ranks [{victim}]" in said or f"rank [{victim}]" in said for said in found.said
        )
        if fault.kind == "flip" and not all("verification of version" in said for said in found.said):
            found.problems.append("an error doesn't say that it is the verification's")
        if last - struck > TIMEOUT_S + GRACE_S:
            found.problems.append(f"the last survivor knew after {last - struck:.1f} s")
        found.detected = expected != "all fail" or all(end is not None and end is not ENDED for end in ended.values())
        return last - struck

    def _check_served(self, found: Injection, ranks: Iterable[int], version: int) -> None:
        """No target serves anything but one version, whole; and all that serve, the same."""
        served = {rank: each for rank, each in self.crew.call("serves", ranks=ranks).items() if each is not None}
        open_ = {rank: each for rank, each in served.items() if not each.fenced}
        for rank, each in open_.items():
            if each.differences:
                found.problems.append(f"rank {rank} serves {each.differences} that aren't version {each.version}")
            if each.version not in (version - 1, version):
                found.problems.append(f"rank {rank} serves version {each.version}")
        if len({each.version for each in open_.values()}) > 1:
            found.problems.append(f"versions {sorted({each.version for each in open_.values()})} are served at once")

    def _wake(self, found: Injection, victim: int) -> None:
        """A process that was thought dead goes on: it learns that it is out, and serves nothing new."""
        self.crew.resume(victim)
        end = self.crew.gather([victim], timeout_s=_GIVE_UP_S).get(victim)
        if end is None or end is ENDED or not end.error:
            found.problems.append(f"rank {victim} woke up and took part: {end}")
        self._check_served(found, self.crew.pids, self._version + 1)

    def _wrong_version(self, fault: Fault, found: Injection) -> None:
        """Everybody means a version that there was, or one rank means another than the others."""
        began, victim = time.monotonic(), self._victim(fault) if fault.victim != "nobody" else -1
        general = self._version + {"repeated version": 0, "older version": -1, "another version": 1}[fault.kind]
        for rank in self.crew.pids:
            self.crew.send("refit", general + (rank == victim), None, ranks=[rank])
        ended = self.crew.gather(self.crew.pids, timeout_s=_GIVE_UP_S)
        found.seconds = self._judge(fault, found, {r: ended.get(r) for r in self.crew.pids}, victim, began)
        wanted = (
            "disagree" if victim >= 0 else f"{general} refused: it must be larger than the last one, {self._version}"
        )
        if any(wanted not in said for said in found.said):
            found.problems.append(f"an error doesn't say {wanted!r}")
        self._check_served(found, self.crew.pids, self._version + 1)

    def _port_taken(self, fault: Fault, found: Injection) -> None:
        """Somebody else listens where the session was to meet."""
        self.crew.call("leave")
        with socket.create_server((HOST, free_port())) as other:
            began = time.monotonic()
            self._send_open(port=other.getsockname()[1])
            ended = self.crew.gather(self.crew.pids, timeout_s=_GIVE_UP_S)
        found.seconds = self._judge(fault, found, {r: ended.get(r) for r in self.crew.pids}, -1, began)
        if not any("can't listen" in said for said in found.said):
            found.problems.append("nobody says that the port is taken")

    def _two_jobs(self, fault: Fault, found: Injection) -> None:
        """Another job of the same host refits at the same time; what a dead process left lies about as well."""
        if self._neighbour is None:
            small = World("2+2", self.world.source, self.world.target, self.world.target_domains, self.world.commit)
            self._neighbour = Campaign(small, folder=self._given or self._folder.name).__enter__()
        with tempfile.TemporaryDirectory(prefix="refit-left-over-") as left, socket.socket(socket.AF_UNIX) as stale:
            stale.bind(f"{left}/s")
            began = time.monotonic()
            for job in (self, self._neighbour):
                job.crew.send("refit", job._version + 1, None)
            for job in (self, self._neighbour):
                ended = job.crew.gather(job.crew.pids, timeout_s=_GIVE_UP_S)
                found.seconds = job._judge(fault, found, {r: ended.get(r) for r in job.crew.pids}, -1, began)
                job._check_served(found, job.crew.pids, job._version + 1)
                job._version += 1

    def _zombie(self, fault: Fault, found: Injection) -> None:
        """An older incarnation of a rank comes to a session whose rank is a newer one."""
        victim = self._victim(fault)
        old = self._incarnations[victim]
        self._replace(victim)
        self._recover()
        began = time.monotonic()
        other = next(rank for rank in self.crew.pids if rank != victim)
        end = self.crew.call("intrude", self._opening, victim, old, ranks=[other])[other]
        found.seconds, found.detected = end.at - began, f"incarnation {old}" in end.error
        found.said.append(end.error)
        if not found.detected:
            found.problems.append(f"an old incarnation isn't told so: {end.error!r}")

    def _driver(self, fault: Fault, found: Injection) -> None:
        """Who drives the ranks through a refit ends, or stops, in the middle."""
        call, share = fault.point.split()
        version, told = self._version + 1, round(float(share) * self.world.size)
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            path = f"{folder}/driver"
            number = signal.SIGKILL if fault.kind == "driver killed" else signal.SIGSTOP
            ours, theirs = multiprocessing.Pipe()
            listener = Listener(path, family="AF_UNIX", backlog=self.world.size)
            pid = os.fork()
            if pid == 0:
                _drive(listener, theirs, self.world.size, stop_at=(call, told), number=number)
            theirs.close()
            try:
                self.crew.send("driven", path, version, TIMEOUT_S + 1.0)
                ended = self.crew.gather(self.crew.pids, timeout_s=2 * _GIVE_UP_S)
                struck = ours.recv() if ours.poll(0.0) else time.monotonic()
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ours.close()
                listener.close()
        found.detected, last = True, struck
        for rank in self.crew.pids:
            end = ended.get(rank)
            if end is None or end is ENDED:
                found.problems.append(f"rank {rank} hangs" if end is None else f"rank {rank} ended")
                continue
            last = max(last, end.at)
            if end.error and end.error not in found.said:
                found.said.append(end.error)
        found.seconds = last - struck
        if found.seconds > TIMEOUT_S + GRACE_S:
            found.problems.append(f"the last rank knew after {found.seconds:.1f} s")
        if not found.said:
            found.problems.append("nobody noticed")
        self._check_served(found, self.crew.pids, version)

    def _victim(self, fault: Fault) -> int:
        first = self.world.source.ranks
        targets = [rank for rank in range(first, self.world.size) if rank not in self._forwarders]
        return {
            "rank 0": 0,
            "source": self._senders[-1],
            "target": (targets or [self.world.size - 1])[-1],
            "forwarder": (self._forwarders or [first])[0],
        }[fault.victim]

    def _replace(self, rank: int) -> None:
        self.crew.end(rank)
        self.crew.start(rank)
        self._incarnations[rank] += 1

    def _send_open(self, fault: Fault | None = None, victim: int = -1, *, port: int = 0) -> None:
        chosen, secret = port or free_port(), secrets.token_hex(8)
        known = tuple(self._incarnations.items())
        self._opening = Opening(chosen, secret, self._version, incarnations=known, host=self._host)
        for rank in self.crew.pids:
            mine = Opening(chosen, secret, self._version, fault if rank == victim else None, known, self._host)
            self.crew.send("open", mine, ranks=[rank])

    def _recover(self) -> int:
        """A new session of all ranks, and a refit that must be exact; how many sessions it took.

        Raises:
            AssertionError: it isn't, or none of a few came about in time.
        """
        sessions = 1
        while late := self._late(self._reopen()):
            sessions += 1
            assert sessions <= _MOST_SESSIONS, f"recovery: {late}"
        for rank, served in self.crew.call("serves").items():
            if served is not None and (served.fenced or served.version != self._version or served.differences):
                raise AssertionError(f"after recovery, rank {rank} serves {served}")
        return sessions

    def _reopen(self) -> dict[int, Any]:
        """How a new session of all ranks ended: in its first refit, unless before."""
        self._send_open()
        opened = self.crew.gather(self.crew.pids, timeout_s=60.0)
        if self._late(opened):
            return opened
        self._version += 2
        self.crew.send("refit", self._version, None)
        return self.crew.gather(self.crew.pids, timeout_s=60.0)

    def _late(self, ended: Mapping[int, Any]) -> str:
        """The error of a session that ended in order, for all, because somebody was late; "" when it didn't fail.

        Raises:
            AssertionError: it failed otherwise.
        """
        found = [end.error for end in ended.values() if isinstance(end, Ended) and " within " in end.error]
        if not found or any(not isinstance(ended.get(rank), Ended) for rank in self.crew.pids):
            self._must(ended)
        return found[0] if found else ""

    def _must(self, ended: Mapping[int, Any]) -> None:
        for rank in self.crew.pids:
            end = ended.get(rank)
            if end is None or end is ENDED or end.error:
                raise AssertionError(f"recovery: rank {rank}: {end}")

    def _left_behind(self, fault: Fault) -> list[str]:
        """Files and processes that weren't there before; descriptors and threads of whoever lives."""
        found = [f"left behind: {path}" for path in sorted(_leavings() - self._before)]
        ours = (
            self._others
            | set(self.crew.pids.values())
            | (set() if self._neighbour is None else set(self._neighbour.crew.pids.values()))
        )
        return found + [f"process {pid} is left" for pid in sorted(_children() - ours)]

    def _grown(self, patience_s: float) -> list[str]:
        found = []
        for rank, least in self._least.items():
            self.crew.send("footprint", least, patience_s, ranks=[rank])
        for rank, held in self.crew.gather(self._least, timeout_s=patience_s + 10.0).items():
            least = self._least[rank]
            if held.descriptors > least.descriptors or held.threads > least.threads:
                found.append(f"rank {rank} holds {held}, at first {least}")
        return found


def _drive(listener: Any, pipe: Any, size: int, *, stop_at: tuple[str, int], number: int) -> None:
    """The driver's process: calls all ranks, one call after the other, and strikes itself."""
    die_with_parent()
    try:
        ranks: dict[int, Any] = {}
        while len(ranks) < size:
            connection = listener.accept()
            ranks[connection.recv()] = connection
        for call in ("begin", "transfer", "finish"):
            for told, rank in enumerate(sorted(ranks)):
                if (call, told) == stop_at:
                    _strike_self(pipe, number)
                ranks[rank].send(call)
            if (call, size) == stop_at:
                _strike_self(pipe, number)
            for connection in ranks.values():
                connection.recv()
    finally:
        os._exit(0)


def _strike_self(pipe: Any, number: int) -> None:
    pipe.send(time.monotonic())
    os.kill(os.getpid(), number)


def _children() -> set[int]:
    """The processes that this one has started and that are there."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _leavings() -> set[str]:
    """What a refit might leave: sockets, segments, namespaces."""
    folders = ((Path(tempfile.gettempdir()), "refit-*"), (Path("/dev/shm"), "*refit*"), (Path("/run/netns"), "nic*"))
    return {str(path) for folder, pattern in folders if folder.exists() for path in folder.glob(pattern)}


def strike_all(
    world: World, faults: Iterable[Fault], *, until: float = float("inf"), announce: Callable[[str], None] = print
) -> list[Injection]:
    """All these faults on one world, for as long as there is time; whoever doesn't recover is replaced whole."""
    done, rest = list[Injection](), list(faults)
    while rest and time.monotonic() < until:
        with Campaign(world) as campaign:
            while rest and time.monotonic() < until:
                began = time.monotonic()
                fault = rest.pop(0)
                done.append(campaign.strike(fault))
                announce(
                    f"{world.name} {world.commit} {fault.kind} {fault.victim} {fault.point}: "
                    f"{done[-1].seconds:.2f} s ({time.monotonic() - began:.1f}) {done[-1].problems or ''}"
                )
                if not done[-1].recovered:
                    break
            else:
                done[-1].problems += campaign.finish()
    return done
