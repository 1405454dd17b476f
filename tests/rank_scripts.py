"""Scripts of one process per rank: started together, each with the rank in its environment, ended together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rank_pool import free_port

TIMEOUT_S = 420.0
# What vLLM reads when it is imported: one process, few threads, little memory.
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run_ranks(
    script: Path,
    folder: Path,
    arguments: Sequence[str],
    *,
    world_size: int,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Runs `python SCRIPT RESULTS.json FOLDER ARGUMENTS...` on every rank; what each wrote, by rank."""
    launched = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    paths = [str(script.parent.parent), str(script.parent), os.environ.get("PYTHONPATH", "")]
    processes = []
    for rank in range(world_size):
        variables = os.environ | VLLM | launched | (environment or {}) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, str(script), str(folder / f"{rank}.json"), str(folder / f"{rank}"), *arguments]
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
    try:
        _wait(processes, folder, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Until all have ended well; the first that fails is the error, not those that wait for it."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        failed = next((rank for rank, code in enumerate(codes) if code is None), None)
    if failed is not None:
        outcome = "is still running" if codes[failed] is None else f"ended with {codes[failed]}"
        raise RuntimeError(f"rank {failed} {outcome}:\n" + (folder / f"{failed}.log").read_text()[-4000:])
