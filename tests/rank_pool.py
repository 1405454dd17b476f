"""Processes that stay up between tests and run one function on every rank, each call with a deadline."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


def free_port() -> int:
    """A port to listen on later: below those that the system gives to sockets, one of which might take it first."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Call:
    """What the first `ranks` processes of a pool run: `function(rank=, world_size=, port=, **arguments)`."""

    pool: RankPool
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    ranks: int


def run_together(*calls: Call, timeout_s: float = 120.0) -> list[list[Any]]:
    """Runs calls of different pools at the same time; the results by call and rank.

    The first failure or a passed deadline ends the processes of all these pools.
    """
    waiting: dict[Connection, tuple[int, int]] = {}
    results: list[list[Any]] = [[None] * call.ranks for call in calls]
    try:
        for number, call in enumerate(calls):
            waiting |= {pipe: (number, rank) for rank, pipe in enumerate(call.pool.send(call))}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait([*waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(f"{calls[number].function.__name__} {rank}" for number, rank in waiting.values())
                raise TimeoutError(f"ranks {', '.join(missing)} gave no answer within {timeout_s:g} s")
            for pipe in ready:
                number, rank = waiting.pop(pipe)  # type: ignore[call-overload]
                failure, results[number][rank] = _receive(pipe, rank)
                if failure:
                    raise RuntimeError(failure)
    except BaseException:
        for call in calls:
            call.pool.close()
        raise
    return results


def _receive(pipe: Any, rank: int) -> tuple[str | None, Any]:
    try:
        failure, result = pipe.recv()
    except EOFError:
        return f"rank {rank} died", None
    return failure, result


def _serve(rank: int, environment: Mapping[str, str], pipe: Connection) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, function(rank=rank, **arguments)))
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever it was, the test must see it
            pipe.send((f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}", None))


class RankPool:
    """Up to `world_size` spawned processes, started when a call needs them, with this environment."""

    def __init__(self, world_size: int, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._environment = dict(environment or {})
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """Calls `function(rank=, world_size=, port=, **arguments)` on every rank; the results by rank."""
        return run_together(Call(self, function, arguments, self.world_size), timeout_s=timeout_s)[0]

    def send(self, call: Call) -> list[Connection]:
        """Starts the call; where its ranks answer."""
        self._start(call.ranks)
        common = {**call.arguments, "world_size": call.ranks, "port": free_port()}
        for pipe in self._pipes[: call.ranks]:
            pipe.send((call.function, common))
        return self._pipes[: call.ranks]

    def _start(self, ranks: int) -> None:
        if ranks > self.world_size:
            raise ValueError(f"a call on {ranks} ranks needs a larger pool than one of {self.world_size}")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self._processes), ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._environment, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(timeout=5)
        self._pipes, self._processes = [], []
