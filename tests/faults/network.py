"""What needs namespaces of its own: networks that are cut and heal, file systems that are full. As root."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults.campaign import Campaign, Injection
from faults.fault import Fault, World

from refit_transport.bench.isolation import Announce, isolated
from refit_transport.bench.lab import Lab, Wiring, run_command
from refit_transport.bench.workload import Side
from refit_transport.config.settings import Commit

CUTS = ("begin", "round 0", "round 0.3", "round 0.7", "verify", "vote")


def strike_systems(*commits: Commit, announce: Announce = print) -> list[Injection]:
    """Every cut and every full file system, in place or staged, in namespaces that vanish with this call."""
    found: list[dict[str, Any]] = isolated(_strike, commits, announce=announce)
    return [Injection(**each) for each in found]


def _strike(commits: tuple[Commit, ...], announce: Announce) -> list[dict[str, Any]]:
    run_command(("ip", "link", "set", "lo", "up"))
    done: list[Injection] = []
    for commit in commits:
        world = World("2+2", Side(tp=2), Side(tp=1, dp=2), 1, commit)
        done += _cuts(world) + _full(world)
        announce(f"{len(done)} injections in namespaces")
    return [asdict(each) for each in done]


def _cuts(world: World) -> list[Injection]:
    """The link of the targets' node goes down in the middle of a refit, and comes back."""
    wiring = Wiring(((0, 1), (2, 3)), "domain", (1000.0, 1000.0))
    done = []
    with Lab(wiring):
        names = [wiring.namespace_of(rank) for rank in range(4)]
        with Campaign(world, namespaces=names, host=wiring.address_of(0)) as campaign:
            for point in CUTS:
                done.append(_Cutting(campaign).strike(point))
                if not done[-1].recovered:
                    break
    return done


class _Cutting:
    """One cut: a source tells when it has come to the point, and goes on when the link is down."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign

    def strike(self, point: str) -> Injection:
        campaign, link = self._campaign, ("ip", "-n", "switch", "link", "set", "port1")
        found = Injection("2+2", campaign.world.commit, "cut", "a domain", point)
        try:
            campaign.crew.told.clear()
            for rank in campaign.crew.pids:
                fault = Fault("cut", "source", point) if rank == 1 else None
                campaign.crew.send("refit", campaign._version + 1, fault, ranks=[rank])
            campaign.crew.await_told(1, timeout_s=10.0)
            run_command((*link, "down"))
            struck = time.monotonic()
            campaign.crew.go_on(1)
            ended = campaign.crew.gather(campaign.crew.pids, timeout_s=12.0)
            found.seconds = campaign._judge(Fault("cut", "source", point), found, ended, -1, struck)
            campaign._check_served(found, campaign.crew.pids, campaign._version + 1)
            if not all("rank " in said for said in found.said):
                found.problems.append("an error names no rank")
        except (RuntimeError, AssertionError, OSError) as error:
            found.problems.append(f"{type(error).__name__}: {error}")
        finally:
            run_command((*link, "up"))
        try:
            found.sessions = campaign._recover()
            found.recovered = True
        except AssertionError as error:
            found.problems.append(str(error))
        return found


def _full(world: World) -> list[Injection]:
    """A small file system of our own is full where temporary files, or shared memory, go."""
    done = []
    for kind, place in (("full disk", Path("/run/small")), ("full memory", Path("/dev/shm"))):
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=32", "none", str(place)], check=True)
        try:
            with Campaign(world, folder=str(place)) as campaign:
                for _ in range(2):
                    found = Injection("2+2", world.commit, kind, "nobody", "connect")
                    # What the session before has there makes room when it is left.
                    campaign.crew.call("leave")
                    fillers = _fill(place)
                    began = time.monotonic()
                    campaign._send_open()
                    ended = campaign.crew.gather(campaign.crew.pids, timeout_s=12.0)
                    # Sockets are files: without one more there is no exchange through shared memory.
                    found.seconds = campaign._judge(Fault("full disk"), found, ended, -1, began)
                    if not any("No space left" in said and "shared_memory: off" in said for said in found.said):
                        found.problems.append("nobody says that there is no space, and what to do")
                    campaign._check_served(found, campaign.crew.pids, campaign._version + 1)
                    for path in fillers:
                        path.unlink()
                    found.sessions = campaign._recover()
                    found.recovered = True
                    found.problems += [f"left behind: {path}" for path in place.iterdir()]
                    done.append(found)
        finally:
            subprocess.run(["umount", str(place)], check=True)
    return done


def _fill(place: Path) -> list[Path]:
    """Files until there is room for none: neither a byte nor a name."""
    made: list[Path] = []
    for content in (bytes(64 << 10), b""):
        with suppress(OSError):
            while True:
                path = place / f"filler-{len(made)}"
                with path.open("wb", buffering=0) as file:
                    made.append(path)
                    file.write(content)
    return made
