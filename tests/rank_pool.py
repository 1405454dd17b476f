"""Processes that stay up between tests and run one function on every rank, each call with a deadline."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, function(rank=rank, world_size=world_size, **arguments)))
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever it was, the test must see it
            pipe.send((f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}", None))


class RankPool:
    """`world_size` spawned processes. The first failure or a passed deadline ends them all."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """Calls `function(rank=, world_size=, port=, **arguments)` on every rank; the results by rank."""
        if not self._processes:
            self._start()
        port = free_port()
        for pipe in self._pipes:
            pipe.send((function, {**arguments, "port": port}))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.world_size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.world_size) if rank not in results]
                self.close()
                raise TimeoutError(f"ranks {missing} gave no answer within {timeout_s} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                failure, results[rank] = self._receive(pipe, rank)
                if failure:
                    self.close()
                    raise RuntimeError(failure)
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[str | None, Any]:
        try:
            failure, result = pipe.recv()
        except EOFError:
            return f"rank {rank} died", None
        return failure, result

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs), daemon=True)
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
