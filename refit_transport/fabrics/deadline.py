"""One deadline for everything that a phase waits for."""

from __future__ import annotations

import time
from datetime import timedelta


class Deadline:
    """A point in time, `seconds` from its creation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    def timedelta(self) -> timedelta:
        """What is left, at least a millisecond, as torch's process groups take it."""
        return timedelta(seconds=max(1e-3, self.remaining()))

    @property
    def passed(self) -> bool:
        return self.remaining() == 0.0
