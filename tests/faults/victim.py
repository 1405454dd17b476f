"""One rank of the campaign: weights, one session at a time, and the harm that it is told to do itself."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Literal

import torch
from faults.fault import MODEL, TIMEOUT_S, Fault, World
from faults.harm import Harm, HarmedTarget, forwards, unjump

from refit_transport.bench.workload import transformer
from refit_transport.errors import RefitTransportError, VersionError
from refit_transport.fabrics import frames
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
from refit_transport.layout.manifest import Manifest
from refit_transport.scheduling.topology import Topology
from refit_transport.session import RefitSession
from refit_transport.testing.oracle import HeldSide, box_of, coordinate_tensor
from refit_transport.testing.sides import HeldSource

HOST = "127.0.0.1"
_OTHER_MODEL = transformer(layers=3, hidden=128)


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session is opened: where rank 0 listens, and what each rank is told."""

    port: int
    secret: str
    version: int
    fault: Fault | None = None
    incarnations: tuple[tuple[int, int], ...] = ()
    host: str = HOST


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call on a rank ended, and when (CLOCK_MONOTONIC, seconds); `error` is "" when it did what it should."""

    error: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class Served:
    """What a target serves: nothing while it is fenced, else the version that it says, and what differs from that."""

    fenced: bool
    version: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: what descriptors stand for that it didn't inherit, threads' names, bytes of memory."""

    open: tuple[str, ...]
    running: tuple[str, ...]
    memory: int

    @property
    def descriptors(self) -> int:
        return len(self.open)

    @property
    def threads(self) -> int:
        return len(self.running)


class Victim:
    """Serves `crew.Crew`."""

    def __init__(self, rank: int, world: World, tell: Callable[[str], None]) -> None:
        # The parent's OpenMP threads aren't there in a fork: torch must not ask for them.
        torch.set_num_threads(1)
        # Nor is there anything of the parent's to collect: to look at all of it costs more than to open a session.
        gc.freeze()
        # Of the parent's descriptors, of which it may have more by the time that it starts another process.
        self._inherited = Counter(_descriptors())
        self.rank, self.world, self._tell = rank, world, tell
        self._role = "source" if rank < world.source.ranks else "target"
        self._binding = self._bound(MODEL)
        self._channel: ControlChannel | None = None
        self._session: RefitSession | None = None
        self._target = HarmedTarget(self._binding)
        self._harm = Harm(None, tell=tell)
        self.version, self.fenced = 0, False
        self._fill(0)

    def open(self, opening: Opening) -> Ended:
        """Opens and prepares a session; one of this rank's is left first."""
        self.leave()
        self.version = max(self.version, opening.version) if self._role == "source" else self.version
        return self._ended(lambda: self._open(opening))

    def refit(self, version: int, fault: Fault | None) -> Ended:
        """Refits once, by a harness that drives all ranks at the same time."""
        self._arm(fault)
        self._fill_source(version)

        def run() -> None:
            self._begin()
            self._harm.at("begin")
            self._transfer(version)
            self._harm.at("voted")
            self._finish(version)
            self._harm.at("finished")

        return self._ended(run)

    def refits(self, first: int, count: int) -> Ended:
        """Many refits in a row."""

        def run() -> None:
            for version in range(first, first + count):
                self._fill_source(version)
                self._begin()
                self._transfer(version)
                self._finish(version)

        self._arm(None)
        return self._ended(run)

    def driven(self, path: str, version: int, patience_s: float) -> Ended:
        """Refits as a driver says, who may vanish or fall silent."""
        self._arm(None)
        self._fill_source(version)
        calls = {"begin": self._begin, "transfer": self._transfer, "finish": self._finish}
        with Client(path, family="AF_UNIX") as driver:
            driver.send(self.rank)

            def run() -> None:
                done = ""
                while done != "finish":
                    if not driver.poll(patience_s):
                        raise TimeoutError(f"the driver says nothing more after {done!r}")
                    done = driver.recv()
                    calls[done](*(() if done == "begin" else (version,)))
                    driver.send(done)

            return self._ended(run)

    def intrude(self, opening: Opening, rank: int, incarnation: int) -> Ended:
        """Tries to join a session as another incarnation of one of its ranks."""

        def run() -> None:
            meeting = Meeting(opening.host, opening.port, opening.secret)
            ControlChannel.join(
                meeting, rank=rank, world_size=self.world.size, timeout_s=TIMEOUT_S, incarnation=incarnation
            ).close()

        return self._ended(run)

    def part(self) -> Literal["sends", "forwards", "receives", "idle"]:
        """What this rank does in a refit, after a first one: of sources that hold the same, some have nothing to do."""
        assert self._session is not None
        transports = self._session.plan.transports.values()
        programs = [transport._program for transport in transports]  # type: ignore[attr-defined]
        steps = [step for program in programs if program is not None for step in program.steps]
        if any(step.incoming is not None for step in steps):
            return "forwards" if any(forwards(program) for program in programs if program is not None) else "receives"
        return "sends" if any(step.sends for step in steps) else "idle"

    def serves(self) -> Served | None:
        """What a target serves; None on a source."""
        if self._role == "source":
            return None
        if self.fenced:
            return Served(True, self.version)
        return Served(False, self.version, tuple(self._differences(self.version)))

    def leave(self) -> None:
        """Leaves the session, if there is one."""
        session, self._session = self._session, None
        channel, self._channel = self._channel, None
        for each in (session, channel):
            if each is not None:
                each.close()
        unjump()
        frames.SCHEMA = 1
        gc.collect()

    def footprint(self, least: Footprint | None, patience_s: float) -> Footprint:
        """What this process holds, once it is no more than `least`, or its patience is over."""
        until = time.monotonic() + patience_s
        while True:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            running = tuple(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
            found = Footprint(tuple((Counter(_descriptors()) - self._inherited).elements()), running, resident)
            fits = least is None or (found.descriptors <= least.descriptors and found.threads <= least.threads)
            if fits or time.monotonic() > until:
                return found
            time.sleep(0.05)

    def settle(self) -> None:
        """Gives freed memory back to the kernel."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def kept(self) -> int:
        """How many values the session's store holds."""
        assert self._channel is not None
        return self._channel.kept()

    def _open(self, opening: Opening) -> None:
        fault, settings, topology = opening.fault, self.world.settings, None
        harm = self._arm(fault, store_port=opening.port)
        kind = "" if fault is None else fault.kind
        if kind == "schema":
            frames.SCHEMA = 2
        binding = self._bound(_OTHER_MODEL) if kind == "another model" else self._binding
        if kind == "plan":
            # A machine that this rank alone sees: every rank in one domain.
            topology = Topology.of([range(self.world.size)])
        channel = self._join(opening)
        self._channel = channel
        harm.channel(channel)
        self._target = HarmedTarget(binding)
        self._target.harm, self._target.commit = harm, self.world.commit
        given = settings if self.rank == 0 else None
        if kind == "settings":
            given = replace(settings, bucket_bytes=2 * settings.bucket_bytes)
        self._session = RefitSession.prepare(
            channel,
            settings=given,
            source=HeldSource(binding) if self._role == "source" else None,
            target=self._target if self._role == "target" else None,
            version=self.version,
            topology=topology,
        )
        self._session._fabric = harm.fabric(self._session._fabric)

    def _join(self, opening: Opening) -> ControlChannel:
        size, known = self.world.size, dict(opening.incarnations)
        if self.rank == 0:
            return ControlChannel.listen(
                host=opening.host,
                port=opening.port,
                world_size=size,
                timeout_s=TIMEOUT_S,
                secret=opening.secret,
                incarnations=known,
            )
        meeting, mine = Meeting(opening.host, opening.port, opening.secret), known.get(self.rank, 0)
        return ControlChannel.join(meeting, rank=self.rank, world_size=size, timeout_s=TIMEOUT_S, incarnation=mine)

    def _arm(self, fault: Fault | None, *, store_port: int | None = None) -> Harm:
        """The session's harm, which from now on does this."""
        if store_port is not None:
            self._harm = Harm(fault, tell=self._tell, store_port=store_port)
        else:
            self._harm.arm(fault)
        return self._harm

    def _begin(self) -> None:
        assert self._session is not None
        self.fenced = self.world.commit == "in_place" and self._role == "target"
        self._session.begin()

    def _transfer(self, version: int) -> None:
        assert self._session is not None
        try:
            self._session.transfer(version)
        except VersionError:
            self.fenced = False  # nothing has moved
            raise

    def _finish(self, version: int) -> None:
        assert self._session is not None
        self.fenced = self._role == "target"
        self._session.finish()
        self.fenced, self.version = False, version

    def _ended(self, call: Callable[[], None]) -> Ended:
        error = kind = ""
        try:
            call()
        except RefitTransportError as failure:
            error, kind = str(failure), type(failure).__name__
        except (TimeoutError, EOFError, ConnectionError) as failure:
            error, kind = f"{type(failure).__name__}: {failure}", "driver"
        at = time.monotonic()
        if error and kind != "VersionError":
            # As every user of a broken session does: the others learn of it.
            with suppress(RefitTransportError):
                self.leave()
        return Ended(error, kind, at)

    def _bound(self, model: Any) -> Any:
        side, first = (self.world.source, 0) if self._role == "source" else (self.world.target, self.world.source.ranks)
        manifest = side.manifest(self._role, model, first_rank=first)  # type: ignore[arg-type]
        own = next(ranked for ranked in manifest.ranks if ranked.rank == self.rank)
        return HeldSide.of(Manifest.of((own,))).bindings[self.rank]

    def _fill_source(self, version: int) -> None:
        if self._role == "source":
            self._fill(version)

    def _fill(self, version: int) -> None:
        for view, expected in self._pieces(version):
            view.copy_(expected)

    def _differences(self, version: int) -> list[str]:
        return [f"piece {n}" for n, (view, e) in enumerate(self._pieces(version)) if not torch.equal(view, e)]

    def _pieces(self, version: int) -> Any:
        binding = self._binding
        whole = {w.name: coordinate_tensor(w.name, w.shape, "bfloat16", version=version) for w in MODEL.weights}
        for index, piece in enumerate(binding.manifest.pieces):
            yield binding.view(index), box_of(whole[piece.tensor], piece.box.offset, piece.box.shape)


def _descriptors() -> tuple[str, ...]:
    """What this process's descriptors stand for."""
    found = []
    for path in [*Path("/proc/self/fd").iterdir()]:
        with suppress(FileNotFoundError):  # the listing's own
            found.append(str(path.readlink()))
    return tuple(found)
