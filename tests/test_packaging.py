"""The pinned environment and the developer commands fit together."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

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
