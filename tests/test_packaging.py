"""The pinned environment and the developer commands fit together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

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
def test_wheel_and_sdist_install_with_the_core_alone(tmp_path):
    """Built without isolation by this environment's setuptools; installed with the core's dependencies."""
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    code = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1]); b.build_wheel(sys.argv[1])"
    dist = tmp_path / "dist"
    subprocess.run([sys.executable, "-c", code, str(dist)], cwd=source, capture_output=True, check=True, timeout=120)
    found = {path.suffix: path for path in dist.iterdir()}
    assert set(found) == {".gz", ".whl"}
    for archive in found.values():
        _check_installed_alone(archive, tmp_path / archive.suffix.strip("."))


def _check_installed_alone(archive: Path, folder: Path) -> None:
    """The core's dependencies come from this environment, nothing else of it does: engines can't be imported."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "own")]
    subprocess.run([sys.executable, *install, str(archive)], check=True, timeout=120)
    refused = ("vllm", "megatron", "ray", "transformers")
    (folder / "own/sitecustomize.py").write_text(
        "import sys\n\n\nclass Refused:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {refused}:\n            raise ModuleNotFoundError(name=name)\n\n\n"
        "sys.meta_path.insert(0, Refused())\n"
    )
    here = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join((str(folder / "own"), here))}

    def run(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = (
        "import sys, refit_transport; print(refit_transport.__file__); refit_transport.reshard; "
        "print(sorted({'vllm', 'megatron', 'ray'} & set(sys.modules)))"
    )
    where, engines = run("-c", script).splitlines()
    assert Path(where).is_relative_to(folder / "own")
    assert engines == "[]"
    assert run("-c", "import sys, refit_transport.cli; print('torch' in sys.modules)") == "False\n"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run("-c", "from refit_transport.cli import main; import sys; sys.argv = ['refit-transport', '--help']; main()")
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5, seconds
