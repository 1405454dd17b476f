"""How a driver starts with us, and how our code gets into workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nemo_sources import DOUBLE

import refit_transport
from refit_transport.integrations.nemo_rl import delivery

PACKAGE = str(Path(refit_transport.__file__).parent)


def start(*arguments: str, paths: tuple[Path, ...] = (DOUBLE,)) -> subprocess.CompletedProcess[str]:
    known = os.pathsep.join(map(str, (*paths, Path(PACKAGE).parent)))
    environment = {**os.environ, "PYTHONPATH": known}
    environment.pop("NEMO_RL_SOURCE", None)
    command = [sys.executable, "-m", "refit_transport.integrations.nemo_rl", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_runs_as_if_started_itself(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'", encoding="utf-8")
    script = tmp_path / "run_grpo.py"
    script.write_text(
        "import os, sys, beside\n"
        "from nemo_rl.weight_sync.factory import create_weight_synchronizer as made\n"
        "print(__name__, sys.argv, beside.NAME, made.__wrapped__ is not None, os.environ['NEMO_RL_SOURCE'])\n"
        "sys.exit(3)\n",
        encoding="utf-8",
    )
    done = start(str(script), "--config", "job.yaml", "policy.precision=float32")
    assert done.returncode == 3, done.stderr
    arguments = [str(script), "--config", "job.yaml", "policy.precision=float32"]
    assert done.stdout.strip() == f"__main__ {arguments} beside True {DOUBLE}"


def test_check_only_compares() -> None:
    done = start("--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "versions and all" in done.stdout
    assert "seams of NeMo RL are as expected" in done.stdout


def test_what_is_wrong_is_one_line() -> None:
    missing = start("nowhere.py")
    assert missing.returncode == 2
    assert (
        missing.stderr.strip() == "there is no script nowhere.py: give the driver's path, such as examples/run_grpo.py"
    )
    without = start("--check", paths=())
    assert without.returncode == 2
    assert without.stderr.startswith("nemo-rl (not installed; it is installed from source, not from PyPI)")
    assert len(without.stderr.splitlines()) == 1
    assert start().returncode == 2


def earlier_hook(environment: dict[str, Any] | None) -> dict[str, Any]:
    return {**(environment or {}), "env_vars": {"EARLIER": "1"}}


def test_the_package_is_added_to_a_jobs_environment_after_whoever_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    delivery.use_hook()
    assert os.environ == {"RAY_RUNTIME_ENV_HOOK": "refit_transport.integrations.nemo_rl.delivery.add_package"}
    assert delivery.add_package(None) == {"py_modules": [PACKAGE]}
    given = {"py_modules": ["theirs"], "working_dir": "."}
    assert delivery.add_package(given) == {"py_modules": ["theirs", PACKAGE], "working_dir": "."}
    assert delivery.add_package(delivery.add_package(given)) == delivery.add_package(given)
    assert given == {"py_modules": ["theirs"], "working_dir": "."}

    monkeypatch.setitem(sys.modules, "earlier", sys.modules[__name__])
    monkeypatch.setattr(os, "environ", {"RAY_RUNTIME_ENV_HOOK": "earlier.earlier_hook"})
    delivery.use_hook()
    delivery.use_hook()
    assert delivery.add_package({}) == {"env_vars": {"EARLIER": "1"}, "py_modules": [PACKAGE]}
