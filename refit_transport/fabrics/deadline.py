"""One deadline for everything that a phase waits for."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")


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


class DeadlineCaller:
    """Runs calls that know no deadline of their own, such as connecting a process group.

    They run one after the other in a thread, which doesn't keep the process alive. A call that isn't back in time is
    left behind there; later ones are refused at once.
    """

    def __init__(self) -> None:
        self._lost = ""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="refit-deadline-caller", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """The function's result, or its error.

        Raises:
            TimeoutError: it isn't back within `timeout_s` seconds, or an earlier call wasn't.
        """
        if self._lost:
            raise TimeoutError(self._lost)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001  # handed to whoever asks for the answer
                answer.set_exception(error)

        self._calls.put(run)
        try:
            return answer.result(timeout_s)
        except NoAnswer:
            if answer.done():
                raise
            self._lost = f"no answer within {timeout_s:g} s"
            raise TimeoutError(self._lost) from None


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := calls.get()) is not None:
        run()
        # Without a call, nothing of the last one is kept alive.
        del run
