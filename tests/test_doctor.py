"""Each check of `refit-transport doctor` can fail, says what to do, and passes on a machine where all is well."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refit_transport import doctor
from refit_transport.cli import app
from refit_transport.config.schema import RefitConfig
from refit_transport.doctor import Environment, Finding, diagnose

RANGE = {"master_port_range_low": 20000, "master_port_range_high": 20009}


def job(*, nodes: int = 1, ports: dict[str, int] | None = None, **settings: Any) -> RefitConfig:
    return RefitConfig.model_validate(
        {
            "policy": {
                "model_name": "m",
                "precision": "float32",
                "megatron_cfg": {"enabled": True},
                "generation": {
                    "colocated": {"enabled": False, "resources": {"gpus_per_node": 2}},
                    "refit_transport": "nccl_reshard",
                    "refit_cfg": {"nccl_reshard": settings},
                },
            },
            "cluster": {"gpus_per_node": 4, "num_nodes": nodes, **(ports or {})},
        }
    )


def healthy(**changes: Any) -> Environment:
    """A machine on which every check is fine."""
    found = Environment(
        versions={"torch": "2.13.0", "ray": "2.60.0", "megatron-core": "0.16.1", "vllm": "0.32.0"},
        requirements=(
            "torch>=2.9",
            'ray>=2.50; extra == "ray"',
            'megatron-core<0.17,>=0.16; extra == "megatron"',
            'vllm<0.33,>=0.32; extra == "vllm"',
            'hypothesis>=6.100; extra == "dev"',
        ),
        plugins=("refit_transport",),
        variables={},
        host="node1",
        resolve=lambda name: ("10.0.0.1",),
        interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)},
        can_listen=lambda host, port: True,
        can_connect=lambda host, port: True,
        ephemeral=(32768, 60999),
        shared=(8 << 30, 8 << 30),
        memory=8 << 30,
        descriptors=65536,
        gpus=0,
        has_nccl=False,
        folder="/tmp",
        leftovers=(),
    )
    return replace(found, **changes)


@pytest.mark.parametrize("config", [None, job(), job(ports=RANGE)])
def test_a_healthy_machine_passes_every_check(tmp_path: Path, config: RefitConfig | None) -> None:
    findings = diagnose(healthy(), config)
    assert [finding for finding in findings if finding.verdict != "fine"] == []
    checks = {finding.check for finding in findings}
    assert checks >= {"torch", "ray", "megatron-core", "vllm", "vLLM plugin", "host name", "interfaces", "ports"}
    assert checks >= {"/dev/shm", "file descriptors", "NCCL", "Ray", "temporary files"}


def taken(*ports: int) -> Callable[[str, int], bool]:
    return lambda host, port: port not in ports


VERSIONS = {"torch": "2.13.0", "ray": "2.60.0", "megatron-core": "0.16.1", "vllm": "0.32.0"}
TROUBLES: list[tuple[str, dict[str, Any], RefitConfig | None, str, str, str]] = [
    ("an old torch", {"versions": VERSIONS | {"torch": "2.8.0"}}, None, "torch", "failed", "pip install 'torch>=2.9"),
    ("a new vLLM", {"versions": VERSIONS | {"vllm": "0.33.1"}}, None, "vllm", "failed", "<0.33"),
    ("no Megatron", {"versions": {"torch": "2.13.0", "vllm": "0.32.0"}}, job(), "megatron-core", "failed", "pip"),
    ("no Ray, no job", {"versions": {"torch": "2.13.0"}}, None, "ray", "warning", "pip install"),
    ("no plugin", {"plugins": ("other",)}, None, "vLLM plugin", "failed", "entry point"),
    ("plugins chosen", {"variables": {"VLLM_PLUGINS": "other"}}, None, "vLLM plugin", "failed", "VLLM_PLUGINS"),
    ("a nameless host", {"resolve": lambda name: ()}, None, "host name", "warning", "/etc/hosts"),
    ("a host on loopback", {"resolve": lambda name: ("127.0.1.1",)}, job(nodes=2), "host name", "failed", "/etc/hosts"),
    ("no interface", {"interfaces": {"eth0": ()}}, None, "interfaces", "failed", "bring up"),
    ("only loopback", {"interfaces": {"lo": ("127.0.0.1",)}}, job(nodes=2), "interfaces", "failed", "bring up"),
    ("gloo elsewhere", {"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, None, "GLOO_SOCKET_IFNAME", "failed", "eth0"),
    ("NCCL elsewhere", {"variables": {"NCCL_SOCKET_IFNAME": "=ib0"}}, None, "NCCL_SOCKET_IFNAME", "failed", "eth0"),
    ("no port at all", {"can_listen": lambda host, port: False}, None, "ports", "failed", "firewall"),
    ("ports taken", {"can_listen": taken(*range(20000, 20007))}, job(ports=RANGE), "ports", "failed", "widen"),
    ("ports of the system", {"ephemeral": (20005, 60999)}, job(ports=RANGE), "ports", "warning", "below"),
    ("no shared memory", {"shared": None}, None, "/dev/shm", "warning", "tmpfs"),
    ("full shared memory", {"shared": (64 << 20, 1 << 20)}, None, "/dev/shm", "failed", "--shm-size"),
    ("leftovers", {"leftovers": ("/tmp/refit-x",)}, None, "leftovers", "warning", "rm -r /tmp/refit-x"),
    ("little memory", {"memory": 100 << 20}, job(staging_bytes="64MiB"), "memory", "failed", "staging_bytes"),
    ("few descriptors", {"descriptors": 256}, None, "file descriptors", "failed", "ulimit -n 4096"),
    ("NCCL without a GPU", {"has_nccl": True}, job(fabric="nccl"), "NCCL", "failed", "gloo or auto"),
    ("NCCL without NCCL", {"gpus": 8}, job(fabric="nccl_m2n"), "NCCL", "failed", "CUDA build"),
    ("a slow way", {"variables": {"NCCL_IB_DISABLE": "1"}}, None, "NCCL_IB_DISABLE", "warning", "unset"),
    ("two nodes, no Ray", {}, job(nodes=2), "RAY_ADDRESS", "failed", "set RAY_ADDRESS"),
    ("no address", {"variables": {"RAY_ADDRESS": "head"}}, None, "RAY_ADDRESS", "failed", "HOST:PORT"),
    (
        "a silent head",
        {"variables": {"RAY_ADDRESS": "10.0.0.9:6379"}, "can_connect": lambda host, port: (host, port) == ("x", 0)},
        None,
        "RAY_ADDRESS",
        "failed",
        "ray start",
    ),
    ("no folder", {"folder": "/nowhere/at/all"}, None, "temporary files", "failed", "TMPDIR"),
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble[0])
def test_each_check_can_fail_and_names_a_remedy(tmp_path: Path, trouble) -> None:
    _, changes, config, check, verdict, remedy = trouble
    found = {finding.check: finding for finding in diagnose(healthy(**changes), config)}[check]
    assert found.verdict == verdict
    assert remedy in found.remedy


def test_a_long_folder_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    [found] = [f for f in diagnose(healthy(folder=str(folder))) if f.check == "temporary files"]
    assert found.verdict == "warning"


def test_whatever_is_not_fine_says_what_to_do(tmp_path: Path) -> None:
    for _, changes, config, *_ in TROUBLES:
        for finding in diagnose(healthy(**changes), config):
            assert bool(finding.remedy) == (finding.verdict != "fine")


def test_the_probes_see_what_is_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not doctor._can_listen("127.0.0.1", port)
        assert doctor._can_connect("127.0.0.1", port)
    assert not doctor._can_connect("127.0.0.1", port)
    assert doctor._can_listen("127.0.0.1", 0)
    assert "127.0.0.1" in doctor._resolve("localhost")
    assert doctor._resolve("no.such.host.invalid") == ()
    for name in ("refit-dead", "refit-alive"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "in-use").touch()
    import fcntl

    with (tmp_path / "refit-alive" / "in-use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert doctor._leftovers(tmp_path) == [str(tmp_path / "refit-dead")]


@pytest.mark.parametrize(("verdict", "code"), [("fine", 0), ("warning", 0), ("failed", 1)])
def test_the_command_fails_where_a_check_does(monkeypatch: pytest.MonkeyPatch, verdict: Any, code: int) -> None:
    finding = Finding("ports", "none", verdict, "" if verdict == "fine" else "open one")
    monkeypatch.setattr(doctor, "diagnose", lambda environment, config: [finding])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout) == {"checks": [finding.to_json()], "failed": code == 1}
    table = CliRunner().invoke(app, ["doctor"])
    assert table.exit_code == code
    assert verdict in table.stdout


def test_the_command_knows_this_machine() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert {"torch", "ports", "interfaces", "/dev/shm", "file descriptors"} <= {c["check"] for c in found["checks"]}
