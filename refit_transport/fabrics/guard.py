"""Ending what has no deadline of its own: device work, and calls into NCCL that wait for a peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from refit_transport.errors import PeerLateError, TransferError
from refit_transport.fabrics.deadline import Deadline

# Each look asks rank 0's store once.
_LOOK_EVERY_S = 0.25


class Guard:
    """While its block runs, a thread aborts it when the deadline passes or another rank reports a failure.

    A block that waits inside NCCL comes back with NCCL's error then; `cause` says why it was aborted. An abort happens
    once.
    """

    def __init__(
        self, abort: Callable[[], None], *, deadline: Deadline, failure: Callable[[], TransferError | None]
    ) -> None:
        self._abort, self._deadline, self._failure = abort, deadline, failure
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._aborted = False
        self._thread = threading.Thread(target=self._watch, name="refit-guard", daemon=True)
        self.cause: TransferError | str | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        self._over.set()
        # An abort that doesn't return must not hold the caller: its thread is left behind.
        self._thread.join(_LOOK_EVERY_S)

    def abort(self) -> None:
        """Aborts, unless that was done before."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._abort()

    def wait_until(self, is_done: Callable[[], bool]) -> bool:
        """Polls until it is done; False when it was aborted before."""
        pause = 1e-5
        while self.cause is None and not is_done():
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return self.cause is None

    def failed(self, rank: int, reason: str, *, peer: int = -1, tensor: str = "", where: str = "") -> TransferError:
        """The error of a block that failed on this rank: what the guard knows, else the given reason."""
        if isinstance(self.cause, TransferError):
            return self.cause
        kind = TransferError if self.cause is None else PeerLateError
        return kind(rank, peer, "transfer", tensor, f"{self.cause or reason}{where}")

    def _watch(self) -> None:
        while not self._over.wait(min(_LOOK_EVERY_S, max(1e-3, self._deadline.remaining()))):
            self.cause = self._find_cause()
            if self.cause is not None:
                self.abort()
                return

    def _find_cause(self) -> TransferError | str | None:
        if self._deadline.passed:
            return f"it was not done within {self._deadline.seconds:g} s"
        try:
            return self._failure()
        except TransferError as error:
            return error
