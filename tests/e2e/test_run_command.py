"""`refit-transport run` as a user starts it: what it prints, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
import yaml

from refit_transport.report import PHASES

ROOT = Path(__file__).resolve().parents[2]
MARK = "REFIT_TRANSPORT_TEST_RUN"
COMMAND = (sys.executable, "-c", "from refit_transport.cli import main; main()")

SMALL = {
    "defaults": str(ROOT / "configs" / "base.yaml"),
    "policy": {
        "megatron_cfg": {"tensor_model_parallel_size": 1},
        "generation": {"refit_transport": "nccl_reshard", "refit_cfg": {"nccl_reshard": {"timeout_s": 60}}},
    },
    "refit_run": {"refits": 2, "steps_per_refit": 1, "tiny_model": {"kind": "dense"}, "report": "report.json"},
}


def processes(mark: str) -> list[tuple[int, str]]:
    """Living processes of one test run, by the variable that they all inherit: (id, command line)."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment and command:
                found.append((int(folder.name), command))
    return found


def temporary_files(folder: Path) -> list[str]:
    """What a run left in its folder for temporary files, beside torch's cache, which all programs share."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_"))


def shared_memory() -> set[str]:
    """The segments of tensor parallel groups and of message queues."""
    return {path.name for path in Path("/dev/shm").iterdir() if "cpushm" in path.name or path.name.startswith("psm_")}


def free_window(count: int) -> int:
    """The first of `count` consecutive ports on which nobody listens."""
    for low in range(21000, 31000, count):
        try:
            for port in range(low, low + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return low
    raise AssertionError("no free ports")


class Run:
    """One run of the command in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        config: dict,
        *arguments: str,
        command: tuple[str, ...] = ("run", "job.yaml"),
        program: tuple[str, ...] = COMMAND,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._shared_memory = shared_memory()
        (folder / "job.yaml").write_text(yaml.safe_dump(config))
        # A short path: names of sockets have 107 bytes at most.
        self._temporary = tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True)
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = self._temporary.name
        self._process = subprocess.Popen(
            (*program, *command, *arguments),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal(self, number: int) -> None:
        """Sends the command itself a signal."""
        self._process.send_signal(number)

    def finish(self, timeout_s: float = 240.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; every process of the run must be gone soon afterwards."""
        try:
            output, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for process, _ in processes(self.mark):
                os.kill(process, signal.SIGKILL)
            raise
        end = time.monotonic() + 20.0
        while (left := processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.2)
        assert left == []
        assert shared_memory() <= self._shared_memory
        assert temporary_files(Path(self._temporary.name)) == []
        self._temporary.cleanup()
        return self._process.returncode, output, errors


def with_changes(**changes: object) -> dict:
    """The small job with dotted keys set."""
    config = json.loads(json.dumps(SMALL))
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    return config


WRONG = {
    "misspelt key": (
        with_changes(policy__generation__refit_transprot="nccl_reshard"),
        ("policy.generation.refit_transprot", "refit_transport"),
    ),
    "missing model folder": (
        with_changes(policy__model_name="no/such/model", refit_run__tiny_model=None),
        ("policy.model_name", "no/such/model"),
    ),
    "colocated": (
        with_changes(policy__generation__colocated={"enabled": True, "resources": {"gpus_per_node": 1}}),
        ("policy.generation.colocated.enabled",),
    ),
    "unknown transport": (
        with_changes(policy__generation__refit_transport="nccl_reshrad"),
        ("nccl_reshrad", "did you mean 'nccl_reshard'?"),
    ),
    "tensor parallel size that does not divide": (
        with_changes(policy__megatron_cfg__tensor_model_parallel_size=3, cluster__gpus_per_node=4),
        ("policy.megatron_cfg.tensor_model_parallel_size", "3"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_ends_at_once_with_one_message(name, tmp_path):
    config, texts = WRONG[name]
    code, output, errors = Run(tmp_path, config).finish(timeout_s=60.0)
    assert (code, output) == (2, "")
    assert all(text in errors for text in texts), errors
    assert "Traceback" not in errors


@pytest.mark.e2e
@pytest.mark.parametrize("async_engine", [False, True])
def test_a_small_job_runs_and_leaves_its_report_and_nothing_else(tmp_path, async_engine):
    low = free_window(12)
    config = with_changes(
        cluster__gpus_per_node=3,
        # Several groups of workers share one range of ports.
        cluster__master_port_range_low=low,
        cluster__master_port_range_high=low + 11,
        policy__generation__colocated={"enabled": False, "resources": {"gpus_per_node": 2}},
        policy__generation__vllm_cfg={"tensor_parallel_size": 2, "async_engine": async_engine},
    )
    code, output, errors = Run(tmp_path, config, "--json").finish()
    assert code == 0, errors
    rounds = json.loads(output)["rounds"]
    assert json.loads((tmp_path / "report.json").read_text()) == {"rounds": rounds}
    assert [found["version"] for found in rounds] == [1, 2]
    for found in rounds:
        assert found["largest_difference"] <= 1e-4 < found["largest_change"]
        assert set(found["report"]["seconds"]) == set(PHASES)
        assert [part["name"] for part in found["report"]["summary"]["transports"]] == [
            "gather_broadcast",
            "nccl_reshard",
        ]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("phase", "number", "code", "word"),
    [
        ("raylet", signal.SIGINT, 130, "interrupted"),
        ("_Host.build", signal.SIGTERM, 143, "terminated"),
        ("_Host.build", signal.SIGHUP, 129, "terminated"),
    ],
)
def test_a_signal_ends_everything(tmp_path, phase, number, code, word):
    run = Run(tmp_path, SMALL)
    end = time.monotonic() + 120.0
    while time.monotonic() < end and not any(phase in command for _, command in processes(run.mark)):
        time.sleep(0.1)
    run.signal(number)
    ended, _, errors = run.finish(timeout_s=60.0)
    assert ended == code, errors
    assert f"{word}; everything that was started has ended" in errors
    assert "Traceback" not in errors
    assert "SIGTERM received" not in errors


STRUCK = """
import os, signal, time, ray
from ray._private import node, worker
from refit_transport.cli import main

def strike_after(place, name):
    start = getattr(place, name)
    def start_and_strike(*arguments, **named):
        start(*arguments, **named)
        os.kill(os.getpid(), signal.SIGTERM)
    setattr(place, name, start_and_strike)

def slowly(shutdown=ray.shutdown):
    time.sleep(4.0)
    shutdown()

ray.shutdown = slowly
strike_after({place}, "{name}")
main()
"""


@pytest.mark.e2e
@pytest.mark.parametrize(("place", "name"), [("node.Node", "start_ray_processes"), ("worker", "connect")])
def test_sigterm_while_ray_starts_is_not_rays_to_answer(tmp_path, place, name):
    """Ray would leave in the middle of its start, or end this process while that still cleans up."""
    program = (sys.executable, "-c", STRUCK.format(place=place, name=name))
    code, _, errors = Run(tmp_path, SMALL, program=program).finish(timeout_s=90.0)
    assert code == 143
    assert "terminated; everything that was started has ended" in errors
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_a_busy_port_is_one_message_that_names_the_setting(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = with_changes(cluster__master_port_range_low=port, cluster__master_port_range_high=port)
        code, _, errors = Run(tmp_path, config).finish()
    assert code == 1
    assert f"every port from {port} to {port} is taken" in errors
    assert "cluster.master_port_range_low" in errors
    assert "Traceback" not in errors


@pytest.mark.e2e
def test_a_worker_killed_at_start_is_named_and_nothing_stays(tmp_path):
    run = Run(tmp_path, SMALL)
    killed = threading.Event()

    def kill_first_build() -> None:
        end = time.monotonic() + 120.0
        while time.monotonic() < end and not killed.is_set():
            for process, command in processes(run.mark):
                if "_Host.build" in command:
                    os.kill(process, signal.SIGKILL)
                    killed.set()
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=kill_first_build)
    thread.start()
    code, output, errors = run.finish()
    thread.join()
    assert killed.is_set()
    assert (code, output) == (1, "")
    assert len(errors) < 1000
    assert "failed in phase start: the process died" in errors
    assert "Traceback" not in errors
