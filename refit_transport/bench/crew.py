"""One forked process per rank, each in its network namespace, that answer calls from here."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Protocol, Self

from refit_transport.bench.isolation import die_with_parent, enter_namespace
from refit_transport.errors import DeadlineError, RefitTransportError, WorkerError

_END_SECONDS = 5.0


class Worker(Protocol):
    """What a rank's process is: an object whose methods are called by name."""

    def close(self) -> None:
        """Ends what it has begun."""


class Crew:
    """The processes of all ranks. A context manager: none is left when it ends, and none outlives this process.

    They are forked, not started anew: what is imported here costs neither time nor memory there.
    """

    def __init__(self, namespaces: Sequence[str], make: Callable[[int], Worker]) -> None:
        """Rank r enters `namespaces[r]` and serves the methods of `make(r)`."""
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        gc.collect()
        gc.freeze()
        try:
            for rank, namespace in enumerate(namespaces):
                self._start(rank, namespace, make)
        except BaseException:
            self.close()
            raise
        finally:
            gc.unfreeze()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with contextlib.suppress(WorkerError, DeadlineError):
                self.call("close", timeout_s=_END_SECONDS)
        self.close()

    def call(self, method: str, *arguments: Any, timeout_s: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls a method on all ranks (or these) at once; the results in the order of the ranks.

        Raises:
            WorkerError: the first rank that raised or ended, and why.
            DeadlineError: a rank didn't answer in time.
        """
        asked = range(len(self._pipes)) if ranks is None else ranks
        for rank in asked:
            self._send(rank, method, arguments)
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        while len(results) < len(asked):
            pending = {self._pipes[rank]: rank for rank in asked if rank not in results}
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                raise DeadlineError("the lab", f"ranks {sorted(pending.values())}", method, timeout_s)
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                results[rank] = self._receive(rank, method)
        return [results[rank] for rank in asked]

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self._pipes:
            pipe.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        self._pipes, self._pids = [], []

    def _start(self, rank: int, namespace: str, make: Callable[[int], Worker]) -> None:
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                for pipe in (*self._pipes, here):
                    pipe.close()
                enter_namespace(namespace)
                _serve(there, make(rank))
                code = 0
            except BaseException:  # noqa: BLE001  # nothing of a rank may run on in the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        there.close()
        self._pids.append(pid)
        self._pipes.append(here)

    def _send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._pipes[rank].send((method, arguments))
        except (BrokenPipeError, ConnectionError) as error:
            raise self._ended(rank, method) from error

    def _receive(self, rank: int, method: str) -> Any:
        try:
            fine, value = self._pipes[rank].recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended(rank, method) from error
        if not fine:
            raise WorkerError("of the lab", rank, method, value)
        return value

    def _ended(self, rank: int, method: str) -> WorkerError:
        """Why a rank's pipe is closed: its exit code, or its signal as a negative number."""
        # The pipe closes a moment before the exit code is there. The process stays a zombie for `close` to reap.
        end = time.monotonic() + _END_SECONDS
        while time.monotonic() < end:
            status = os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                return WorkerError("of the lab", rank, method, f"the process ended with exit code {code}")
            time.sleep(0.01)
        return WorkerError("of the lab", rank, method, "the process closed its pipe")


def _serve(pipe: Connection, worker: Worker) -> None:
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, method)(*arguments)))
        except RefitTransportError as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
        except Exception:  # noqa: BLE001  # the boundary: whatever it was, the caller must see it
            pipe.send((False, traceback.format_exc()))
