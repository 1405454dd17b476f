"""Ranks as threads of one process, joined by a real control channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from refit_transport.fabrics.rendezvous import ControlChannel

T = TypeVar("T")


def run_ranks(world_size: int, main: Callable[[ControlChannel], T], *, timeout_s: float = 60.0) -> list[T]:
    """Calls `main` once per rank, each in its own thread with its own channel; returns the results by rank.

    Raises:
        TimeoutError: some rank is still running after `timeout_s`.
        BaseException: the error that came first, of whichever rank.
    """
    host = "127.0.0.1"
    first = ControlChannel.listen(host=host, port=0, world_size=world_size, timeout_s=timeout_s)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            channel = first
            if rank:
                channel = ControlChannel.join(first.meeting, rank=rank, world_size=world_size, timeout_s=timeout_s)
            results[rank] = main(channel)
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise next(iter(errors.values()))
    if len(results) < world_size:
        raise TimeoutError(f"ranks {sorted(set(range(world_size)) - results.keys())} still run after {timeout_s:g} s")
    return [results[rank] for rank in range(world_size)]
