"""Payload slots: the memory in which what is packed, received and passed on lies while it is under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from refit_transport.scheduling.pour import aligned
from refit_transport.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """How a rank's slot memory is divided: the same on every rank, so that a peer's slots can be found.

    The i-th payload that a rank takes part in uses slot i modulo `count`. Sizes are in bytes.
    """

    slot_bytes: int
    count: int

    @classmethod
    def of(cls, schedules: Iterable[Schedule], *, staging_bytes: int) -> Self:
        """Slots for the largest payload of schedules that run one after the other: as many as fit, 2 at least."""
        largest = max((int(s.payloads.size.max()) for s in schedules if len(s.payloads)), default=1)
        slot_bytes = aligned(largest)
        return cls(slot_bytes, max(2, staging_bytes // slot_bytes))

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * self.count

    def offset(self, step: int) -> int:
        """Where in its slot memory a rank keeps the payload of its step of this number."""
        return step % self.count * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Slots:
    """One rank's slot memory (uint8), and that of the peers whose memory it can read; pages are touched when used."""

    own: torch.Tensor
    peers: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def private(cls, nbytes: int) -> Self:
        """Memory that no peer can read."""
        return cls(torch.empty(nbytes, dtype=torch.uint8))
