"""The protocol of what moves bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.program import Program
from refit_transport.fabrics.slots import Slots

Phase = Literal["pack", "network", "exchange", "unpack", "load"]


@dataclass(slots=True)
class Spent:
    """What a transport took on one rank: seconds by phase and payload bytes that really crossed.

    pack: copying into payload slots, and between local views. network: waiting for peers of other hosts or domains.
    exchange: waiting for peers that share memory. unpack: copying out of slots. load: the engine's own loader.
    """

    pack: float = 0.0
    network: float = 0.0
    exchange: float = 0.0
    unpack: float = 0.0
    load: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0

    def add(self, other: Spent) -> None:
        """Adds another program's figures to this one's."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def timing(self, phase: Phase) -> _Timing:
        """A context that adds its wall time to a phase."""
        return _Timing(self, phase)


class _Timing:
    """No generator: a transfer enters several of these for every payload, between which nothing may take time."""

    __slots__ = ("_began", "_phase", "_spent")

    def __init__(self, spent: Spent, phase: Phase) -> None:
        self._began = time.perf_counter()
        self._spent, self._phase = spent, phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        setattr(self._spent, self._phase, getattr(self._spent, self._phase) + time.perf_counter() - self._began)


class Fabric(Protocol):
    """A private group of ranks. Every rank of the group runs its own program of the same schedule (collective)."""

    @property
    def memory(self) -> Slots:
        """The slots that programs for this fabric are to be lowered on."""

    def run(self, program: Program, *, deadline: Deadline) -> Spent:
        """Executes one rank's program.

        Raises:
            TransferError: a peer failed, vanished, or didn't answer in time; the fabric can't be used again.
        """

    def close(self) -> None:
        """Leaves the group; peers that wait for this rank fail at once."""
