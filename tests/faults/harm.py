"""How a rank does itself the harm that it is told to, at an exact point of a refit; the package knows nothing of it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from faults.fault import Fault

from refit_transport.fabrics import deadline as deadline_module
from refit_transport.fabrics import store_server
from refit_transport.fabrics.base import Fabric, Spent
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Moves, Program, Step
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.slots import Slots
from refit_transport.testing.sides import HeldTarget

INJECTED = "injected by the campaign"
_SLOWER = 20
_JUMP_S = 3600.0


class InjectedError(Exception):
    """What a raising loader raises."""


class Harm:
    """Strikes once, when its point has come; `tell` lets the campaign know the moment before."""

    def __init__(self, fault: Fault | None, *, tell: Callable[[str], None], store_port: int = 0) -> None:
        self.fault, self._tell, self._store_port = fault, tell, store_port
        self._done = fault is None

    def arm(self, fault: Fault | None) -> None:
        """From now on, does this."""
        self.fault, self._done = fault, fault is None

    def at(self, point: str) -> None:
        """The rank has come to this point."""
        if not point or self._done or self.fault is None or self.fault.point != point:
            return
        self._done = True
        strike = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "wake": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "reset peers": lambda: self._reset(is_store=False),
            "reset store": lambda: self._reset(is_store=True),
            "loader": _raise,
            "wall clock": _jump_wall,
            "monotonic clock": _jump_monotonic,
            "cut": lambda: None,
        }[self.fault.kind]
        self._tell("waiting" if self.fault.kind == "cut" else "injected")
        strike()

    def fabric(self, fabric: Fabric) -> Fabric:
        """The fabric, whose programs come to points of their own."""
        return _HarmedFabric(fabric, self)

    def channel(self, channel: ControlChannel) -> None:
        """Has the channel's calls come to points."""
        agree, publish, collect, group_store = channel.agree, channel.publish, channel.collect, channel.group_store

        def harmed_agree(what: str, value: Any, **named: Any) -> Any:
            before = {"what arrived": "vote", "what is served": "serve vote"}
            self.at(before.get(what.split("/")[0], ""))
            found = agree(what, value, **named)
            self.at("agreed" if what.startswith("the weight version") else "")
            return found

        def harmed_publish(topic: str, value: Any) -> None:
            self.at("prepare" if topic == "place" else "")
            publish(topic, value)

        def harmed_collect(topic: str, ranks: Any, **named: Any) -> Any:
            # The comparison of the sources' replicas has another topic.
            self.at("verify" if topic.startswith("checksums/") and topic[-1].isdigit() else "")
            return collect(topic, ranks, **named)

        def harmed_group_store(name: str) -> Any:
            self.at("connect")
            return group_store(name)

        for name, call in (
            ("agree", harmed_agree),
            ("publish", harmed_publish),
            ("collect", harmed_collect),
            ("group_store", harmed_group_store),
        ):
            setattr(channel, name, call)

    def program(self, program: Program) -> Program:
        """A rank's steps, with what this harm does between and to them."""
        if self.fault is None or not program.steps:
            return program
        steps = list(program.steps)
        if self.fault.point.startswith("round"):
            index = round(float(self.fault.point.split()[1]) * (len(steps) - 1))
            if self.fault.kind == "flip":
                self._flip(steps, index)
            else:
                steps[index] = _before(steps[index], lambda: self.at(self.fault.point))  # type: ignore[union-attr]
        elif self.fault.kind in ("slow", "too slow"):
            self._tell("injected")
            pause = _slow_pause(len(steps)) if self.fault.kind == "slow" else 6.0 / len(steps)
            steps = [_before(step, lambda: time.sleep(pause)) for step in steps]
        return replace(program, steps=tuple(steps))

    def _flip(self, steps: list[Step], index: int) -> None:
        """One bit of a payload: after a source has packed it, or when it has arrived at a target."""
        for step in [*steps[index:], *steps[:index]]:
            if step.incoming is None and step.slot_offset is not None and step.nbytes:
                changed = replace(step, pack=_Flipped(step.pack.into, step.pack.out_of, step.memory, self._flipping))
            elif step.incoming is not None and step.unpack.into:
                where = step.unpack.into[0]
                changed = replace(step, unpack=_Flipped(step.unpack.into, step.unpack.out_of, where, self._flipping))
            elif step.incoming is not None and step.shared is None:
                changed = replace(step, unpack=_Flipped((), (), step.memory, self._flipping))
            else:
                continue
            steps[steps.index(step)] = changed
            return
        raise AssertionError("no payload that can be changed on its way")

    def _flipping(self) -> bool:
        if self._done:
            return False
        self._done = True
        self._tell("injected")
        return True

    def _reset(self, *, is_store: bool) -> None:
        """Breaks connections off as a router would that forgot them: the other end gets a reset."""
        for path in [*Path("/proc/self/fd").iterdir()]:
            if not path.is_socket():
                continue
            # Not to be closed here: it is its owner's.
            with socket.socket(fileno=os.dup(int(path.name))) as duplicate:
                if _is_peer(duplicate, self._store_port) if not is_store else _is_store(duplicate, self._store_port):
                    _break_off(duplicate)


class HarmedTarget(HeldTarget):
    """A target whose loader comes to points, and which knows whether it may be used."""

    harm = Harm(None, tell=lambda _: None)
    commit = "in_place"

    def begin(self) -> None:
        super().begin()
        self.harm.at("apply" if self.commit == "staged" else "")

    def finish(self) -> None:
        super().finish()
        self.harm.at("applied" if self.commit == "staged" else "load")


@dataclass(frozen=True, slots=True)
class _Flipped(Moves):
    memory: torch.Tensor | None = None
    strikes: Callable[[], bool] = lambda: False

    def make(self) -> None:
        Moves.make(self)
        if self.memory is not None and self.strikes():
            first = self.memory.as_strided((1,), (1,), self.memory.storage_offset())
            first.view(torch.uint8)[0] ^= 1


class _HarmedFabric:
    def __init__(self, fabric: Fabric, harm: Harm) -> None:
        self._fabric, self.harm = fabric, harm

    @property
    def memory(self) -> Slots:
        return self._fabric.memory

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        return self._fabric.run(self.harm.program(program), deadline=deadline)

    def close(self) -> None:
        self._fabric.close()


@dataclass(frozen=True, slots=True)
class _First(Moves):
    """Copies that come after something else."""

    first: Callable[[], None] = lambda: None

    def make(self) -> None:
        self.first()
        Moves.make(self)


def _before(step: Step, call: Callable[[], None]) -> Step:
    """The step, with a call before its payload is packed, or when it has arrived and before it is unpacked."""
    if step.incoming is None:
        return replace(step, pack=_First(step.pack.into, step.pack.out_of, call))
    return replace(step, unpack=_First(step.unpack.into, step.unpack.out_of, call))


def forwards(program: Program) -> bool:
    """Whether the rank passes on what it receives."""
    return any(step.incoming is not None and step.sends for step in program.steps)


def _slow_pause(steps: int) -> float:
    """A refit without a fault takes some 20 ms here."""
    return 0.02 * _SLOWER / steps


def _raise() -> None:
    raise InjectedError(INJECTED)


def _jump_wall() -> None:
    """Everything of the package that reads the wall clock reads an hour more."""
    jumped = time.time() + _JUMP_S
    time.time = lambda: jumped


def unjump() -> None:
    """The clocks go right again."""
    time.time = _WALL
    for module in (deadline_module, store_server):
        module.time = time  # type: ignore[attr-defined]


def _jump_monotonic() -> None:
    """As after a machine has slept: for this rank an hour has passed at once."""
    ahead = SimpleNamespace(monotonic=lambda: time.monotonic() + _JUMP_S, sleep=time.sleep)
    for module in (deadline_module, store_server):
        module.time = ahead  # type: ignore[attr-defined]


_WALL = time.time


def _is_store(connection: socket.socket, port: int) -> bool:
    if connection.family != socket.AF_INET:
        return False
    try:
        return connection.getpeername()[1] == port
    except OSError:
        return False


def _is_peer(connection: socket.socket, port: int) -> bool:
    if connection.family == socket.AF_INET6 or connection.family == socket.AF_INET:
        try:
            return port not in (connection.getpeername()[1], connection.getsockname()[1])
        except OSError:
            return False
    return False


def _break_off(connection: socket.socket) -> None:
    """`connect` to no address ends a connection with a reset."""
    unspecified = (ctypes.c_ubyte * 16)()
    ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), unspecified, 16)
