"""What is done to a refit, as data, and what must come of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

from refit_transport.bench.workload import Side, transformer
from refit_transport.config.settings import Commit, RefitSettings, SharedMemory
from refit_transport.layout.manifest import Manifest

TIMEOUT_S = 2.0
# How long after `timeout_s` a survivor may know what has happened.
GRACE_S = 5.0

MODEL = transformer(layers=3, hidden=64)
ROUNDS = ("round 0", "round 0.3", "round 0.7", "round 1")

Kind = Literal[
    "kill", "stop", "wake", "reset peers", "reset store", "slow", "too slow", "loader", "flip", "wall clock",
    "monotonic clock", "schema", "cut", "full memory", "full disk", "settings",
    "plan", "repeated version", "older version", "another version", "another model", "port", "two jobs",
    "driver killed", "driver stopped", "zombie",
]  # fmt: skip
Victim = Literal["source", "target", "forwarder", "rank 0", "nobody"]
Outcome = Literal["all fail", "none fails", "either"]


@dataclass(frozen=True, slots=True)
class World:
    """Ranks and the settings of their sessions. Sources are ranks from 0, in one domain; targets follow."""

    name: str
    source: Side
    target: Side
    target_domains: int
    commit: Commit = "in_place"
    shared_memory: SharedMemory = "auto"

    @property
    def size(self) -> int:
        return self.source.ranks + self.target.ranks

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each domain."""
        first, each = self.source.ranks, self.target.ranks // self.target_domains
        targets = (tuple(range(first + n * each, first + (n + 1) * each)) for n in range(self.target_domains))
        return (tuple(range(first)), *targets)

    @property
    def settings(self) -> RefitSettings:
        """Verified in full, so that nothing wrong can be committed; many small rounds."""
        return RefitSettings(
            coverage="all",
            fabric="gloo",
            domains=self.domains,
            shared_memory=self.shared_memory,
            bucket_bytes=8 << 10,
            staging_bytes=64 << 10,
            timeout_s=TIMEOUT_S,
            verify="full",
            commit=self.commit,
        )

    def manifest(self, role: Literal["source", "target"]) -> Manifest:
        """What one side's ranks hold."""
        side, first = (self.source, 0) if role == "source" else (self.target, self.source.ranks)
        return side.manifest(role, MODEL, first_rank=first)


@dataclass(frozen=True, slots=True)
class Fault:
    """One injection: `kind` strikes `victim` when it has come to `point` of a refit."""

    kind: Kind
    victim: Victim = "nobody"
    point: str = ""

    def expected(self, commit: Commit) -> Outcome:
        """What the other ranks' calls must come to."""
        if self.kind in ("slow", "wall clock", "full memory", "two jobs"):
            return "none fails"
        if self.kind == "monotonic clock":
            return "either"
        if self.point == "finished":
            return "none fails"
        if self.kind == "cut" and self.point in ("verify", "vote") and commit == "in_place":
            # Who is cut off may have voted before: then the others have everybody's word, and it stays fenced.
            return "either"
        if self.point == "voted":
            # In place the vote on what arrived was the last word; staged, all must also have taken it over.
            return "none fails" if commit == "in_place" else "all fail"
        return "all fail"

    @property
    def is_named(self) -> bool:
        """Whether all survivors must name the victim.

        While they connect, they aren't always heard in time; and a rank that is only too slow is heard itself.
        """
        kinds = ("kill", "stop", "wake", "loader", "reset store")
        return self.kind in kinds and self.point not in ("prepare", "connect")


PLACES = ("begin", "agreed", *ROUNDS, "verify", "vote", "voted", "finished")


def points_of(commit: Commit, victim: Victim) -> tuple[str, ...]:
    """Where a process of this role can be struck."""
    is_target = victim in ("target", "forwarder")
    loading = ("load",) if is_target and commit == "in_place" else ()
    taking_over = ("apply", "applied") if is_target else ()
    return ("prepare", "connect", *PLACES, *loading, *((*taking_over, "serve vote") if commit == "staged" else ()))


def faults_of(commit: Commit) -> dict[str, list[Fault]]:
    """Every fault that can strike a running job, by kind of fault."""
    roles: tuple[Victim, ...] = ("source", "target", "forwarder", "rank 0")
    everywhere = [(role, point) for role in roles for point in points_of(commit, role)]
    moving = [(role, point) for role in roles for point in (*ROUNDS[:3], "agreed")]
    loading = ("load",) if commit == "in_place" else ("apply", "applied")
    found: dict[str, list[Fault]] = {
        "kill": [Fault("kill", *each) for each in everywhere],
        "stop": [Fault("stop", *each) for each in everywhere if each[1] != "finished"],
        "wake": [Fault("wake", role, point) for role, point in moving],
        "reset peers": [Fault("reset peers", role, point) for role, point in moving],
        "reset store": [Fault("reset store", role, "agreed") for role in roles[:3]]
        + [Fault("reset store", role, "round 0.3") for role in roles[:3]],
        "slow": [Fault("slow", role) for role in roles],
        "too slow": [Fault("too slow", role) for role in roles],
        "loader": [Fault("loader", role, point) for role in roles[1:3] for point in loading],
        "flip": [Fault("flip", role, point) for role in roles[:3] for point in ROUNDS],
        "wall clock": [Fault("wall clock", role, point) for role in roles for point in ("begin", *ROUNDS)],
        "monotonic clock": [Fault("monotonic clock", role, point) for role in roles for point in ("begin", *ROUNDS)],
    }
    found |= {
        name: [Fault(name, role) for role in roles_of_it]  # type: ignore[arg-type]
        for name, roles_of_it in (
            ("settings", ("source", "target")),
            ("schema", ("source", "target")),
            ("plan", ("source", "target")),
            ("repeated version", ("nobody",)),
            ("older version", ("nobody",)),
            ("another version", ("source", "target", "rank 0")),
            ("another model", ("source", "target", "rank 0")),
            ("port", ("nobody",)),
            ("two jobs", ("nobody",)),
            ("zombie", ("source", "target")),
        )
    }
    driven = ("begin 0.5", "begin 1", "transfer 0.5", "transfer 1", "finish 0.5")
    found["driver killed"] = [Fault("driver killed", "nobody", point) for point in driven]
    found["driver stopped"] = [Fault("driver stopped", "nobody", point) for point in driven]
    return found


def drawn(kinds: dict[str, int], commit: Commit, seed: int) -> Iterator[Fault]:
    """So many faults of each kind: every one of a kind once before any comes again, in an order of the seed's."""
    chance, chosen = random.Random(seed), []
    known = faults_of(commit)
    for kind, count in kinds.items():
        faults = known[kind]
        chosen += list(islice(cycle(chance.sample(faults, len(faults))), count))
    chance.shuffle(chosen)
    yield from chosen
