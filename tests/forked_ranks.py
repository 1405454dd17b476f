"""Ranks as forked processes joined by a real control channel, each with a deadline."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from channels import open_channel
from rank_pool import free_port

from refit_transport.fabrics.rendezvous import ControlChannel


def run_forked(
    world_size: int, main: Callable[[ControlChannel], Any], *, timeout_s: float = 60.0, lost: Collection[int] = ()
) -> list[Any]:
    """Calls `main` once per rank in a process of its own; the results by rank, None for ranks that are `lost`.

    Raises:
        RuntimeError: a rank failed, or died without being in `lost`.
        TimeoutError: a rank is still running after `timeout_s`.
    """
    port, context = free_port(), multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(rank, world_size, port, main, theirs, timeout_s), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _results(pipes, lost=lost, timeout_s=timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join(5.0)
            process.close()
        for pipe in pipes:
            pipe.close()


def _results(pipes: list[Connection], *, lost: Collection[int], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting, end = dict(zip(map(id, pipes), range(len(pipes)), strict=True)), time.monotonic() + timeout_s
    while waiting:
        ready = wait([pipe for pipe in pipes if id(pipe) in waiting], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer within {timeout_s:g} s")
        for pipe in ready:
            rank = waiting.pop(id(pipe))
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                failure = None if rank in lost else f"rank {rank} died"
            if failure:
                raise RuntimeError(failure)
    return results


def _serve(
    rank: int, world_size: int, port: int, main: Callable[[ControlChannel], Any], pipe: Connection, timeout_s: float
) -> None:
    # The parent's OpenMP threads aren't there in a fork: torch must not ask for them.
    torch.set_num_threads(1)
    try:
        channel = open_channel(rank, world_size=world_size, port=port, timeout_s=timeout_s)
        pipe.send((None, main(channel)))
        # To end without leaving first is what a process does that dies.
        if rank:
            channel.close()
        # Rank 0 hosts the channel: it stays until the parent has every result.
        time.sleep(timeout_s if rank == 0 else 0.0)
    except BaseException as error:  # noqa: BLE001 - the boundary: whatever it was, the test must see it
        pipe.send((f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}", None))
    finally:
        os._exit(0)
