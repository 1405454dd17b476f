"""Processes that are struck: forked, told what to do, and replaced when they have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from refit_transport.bench.isolation import die_with_parent, enter_namespace

ENDED = "ended"
# Of every crew of this process: a member that is forked later must hold none of them.
_PIPES: set[Connection] = set()


class Crew:
    """One process per rank. Unlike the benchmark's, it outlives its members: they are there to be killed."""

    def __init__(self, size: int, make: Callable[[int, Callable[[str], None]], Any], namespaces: Any = None) -> None:
        self._make, self._namespaces = make, namespaces
        self._pipes: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self.told: dict[int, float] = {}
        for rank in range(size):
            self.start(rank)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in [*self.pids]:
            self.end(rank)

    def start(self, rank: int) -> None:
        """Forks a rank's process."""
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent()
                for pipe in (*_PIPES, here):
                    pipe.close()
                if self._namespaces is not None:
                    enter_namespace(self._namespaces[rank])
                _serve(there, lambda tell: self._make(rank, tell))
            except BaseException:  # noqa: BLE001  # nothing of a rank may run on in the parent's code
                traceback.print_exc()
            finally:
                os._exit(1)
        there.close()
        self.pids[rank], self._pipes[rank] = pid, here
        _PIPES.add(here)

    def end(self, rank: int) -> None:
        """Kills a rank's process, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)
        os.waitpid(self.pids.pop(rank), 0)
        pipe = self._pipes.pop(rank)
        _PIPES.discard(pipe)
        pipe.close()

    def resume(self, rank: int) -> None:
        """Lets a stopped process go on."""
        os.kill(self.pids[rank], signal.SIGCONT)

    def await_told(self, rank: int, *, timeout_s: float) -> None:
        """Returns when a rank has come to where it is to be struck.

        Raises:
            RuntimeError: it didn't.
        """
        if not self._pipes[rank].poll(timeout_s):
            raise RuntimeError(f"rank {rank} didn't come to the point")
        kind, value = self._pipes[rank].recv()
        if kind != "told":
            raise RuntimeError(f"rank {rank} answered {value} instead of coming to the point")
        self.told[rank] = value

    def go_on(self, rank: int) -> None:
        """Lets a rank go on that waits where it was to be struck."""
        self._pipes[rank].send("go on")

    def send(self, method: str, *arguments: Any, ranks: Iterable[int] | None = None) -> None:
        """Starts a call on all ranks, or these."""
        for rank in [*self.pids] if ranks is None else ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                self._pipes[rank].send((method, arguments))

    def gather(self, ranks: Iterable[int], *, timeout_s: float) -> dict[int, Any]:
        """The answers by rank, `ENDED` of ranks whose process has; those that gave none in time are missing."""
        waiting, found = {self._pipes[rank]: rank for rank in ranks}, dict[int, Any]()
        until = time.monotonic() + timeout_s
        while waiting:
            ready = wait([*waiting], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    kind, value = "answer", ENDED
                if kind == "told":
                    self.told[rank] = value
                elif kind == "broken":
                    raise RuntimeError(f"rank {rank}: {value}")
                else:
                    found[rank] = value
                    del waiting[pipe]  # type: ignore[arg-type]
        return found

    def call(self, method: str, *arguments: Any, ranks: Iterable[int] | None = None, timeout_s: float = 60.0) -> Any:
        """What every rank answers, by rank.

        Raises:
            RuntimeError: one gave no answer.
        """
        asked = [*self.pids] if ranks is None else [*ranks]
        self.send(method, *arguments, ranks=asked)
        found = self.gather(asked, timeout_s=timeout_s)
        if lost := [rank for rank in asked if found.get(rank, ENDED) is ENDED]:
            raise RuntimeError(f"{method}: ranks {lost} gave no answer")
        return found


def _serve(pipe: Connection, make: Callable[[Callable[[str], None]], Any]) -> None:
    worker = make(lambda what: _tell(pipe, what))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("answer", getattr(worker, method)(*arguments)))
        except Exception:  # noqa: BLE001  # the boundary: a fault of the campaign itself
            pipe.send(("broken", traceback.format_exc()))


def _tell(pipe: Connection, what: str) -> None:
    pipe.send(("told", time.monotonic()))
    if what == "waiting":
        pipe.recv()
