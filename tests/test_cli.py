"""The command line: exit codes, JSON, one message on stderr, and how fast it answers."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refit_transport import cli
from refit_transport.cli import app
from refit_transport.cli_run import write_report
from refit_transport.errors import ConfigError, MissingDependencyError, TransferError

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs/demo.yaml")


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = "from refit_transport.cli import main; main()"
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def test_validate_fine() -> None:
    code, out, err = invoke("validate", DEMO)
    assert (code, err) == (0, "")
    assert "nccl_reshard" in out
    assert "fine" in out


def test_validate_json() -> None:
    code, out, _ = invoke("validate", DEMO, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["ok"]
    assert found["summary"]["domains"] == [[0, 1], [2, 3]]
    assert found["config"]["policy"]["generation"]["refit_cfg"]["nccl_reshard"]["coverage"] == "all"


def test_validate_wrong() -> None:
    code, out, err = invoke("validate", DEMO, "--set", "policy.precision=int8", "--set", "zebra=1")
    assert (code, out) == (2, "")
    assert "2 problems" in err
    assert "policy.precision" in err
    assert "zebra" in err


def test_validate_wrong_json() -> None:
    code, out, err = invoke("validate", DEMO, "--json", "--set", "policy.precision=flot32")
    found = json.loads(out)
    assert code == 2
    assert not found["ok"]
    assert found["violations"] == [
        {
            "path": "policy.precision",
            "value": "'flot32', set in --set",
            "reason": "must be float32 or bfloat16",
            "remedy": "did you mean 'float32'?",
        }
    ]
    assert "policy.precision" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "no-such-file.yaml"],
        ["validte"],
        ["validate", DEMO, "--st", "a=1"],
        ["validate", DEMO, "--set", "a"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Class", "there is no module 'no_such_module'"),
        ("os:path", "has no class 'path'"),
        ("json:JSONDecoder", "is no transport"),
        ("broken_transport:Mine", "its import fails: ZeroDivisionError"),
    ],
)
def test_a_transport_by_its_path_is_tried_before_anything_starts(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_transport.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke("run", DEMO, "--set", f"policy.generation.refit_transport={name}")
    assert (code, out) == (2, "")
    assert "policy.generation.refit_transport: is an unknown transport" in err
    assert reason in err
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


def test_a_report_that_cannot_be_written_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for report in (".", "file/report.json"):
        code, out, err = invoke("run", DEMO, "--set", f"refit_run.report={report}")
        assert (code, out) == (2, "")
        assert "refit_run.report: can't be written" in err
        assert "name another file" in err
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "new" / "report.json"
    write_report([], report)
    assert json.loads(report.read_text()) == {"rounds": []}
    report.write_text("the last one")

    def no_room(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(ConfigError, match="No space left"):
        write_report([], report)
    assert report.read_text() == "the last one"
    assert list(report.parent.iterdir()) == [report]


def test_transports() -> None:
    code, out, _ = invoke("transports")
    assert code == 0
    assert "nccl_reshard" in out
    code, out, _ = invoke("transports", "--json")
    listed = json.loads(out)
    assert listed["default"] == "gather_broadcast"
    assert [entry["name"] for entry in listed["transports"]] == ["nccl_reshard", "gather_broadcast"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TransferError(1, 2, "network", "lm_head.weight", "peer is gone"), 1),
        (MissingDependencyError("ray", "run", "ray"), 2),
    ],
)
def test_our_errors_are_one_message(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "load", fail)
    assert invoke("validate", DEMO) == (code, "", f"refit-transport: {error}\n")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "load", fail)
    assert isinstance(CliRunner().invoke(app, ["validate", DEMO]).exception, ZeroDivisionError)


def test_a_real_process() -> None:
    good = run("validate", DEMO)
    assert (good.returncode, good.stderr) == (0, "")
    bad = run("validate", DEMO, "--set", "policy.generation.colocated.enabled=true")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "colocated.enabled: must be false" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert run("no-such-command").returncode == 2


def test_help_imports_no_engine() -> None:
    """Which is why it answers at once; how fast is timed in a clean environment, see test_packaging.py."""
    engines = {"torch", "vllm", "megatron", "ray", "transformers"}
    commands = [[], *([command.callback.__name__] for command in app.registered_commands if command.callback)]
    assert ["run"] in commands
    script = (
        "import sys\nfrom refit_transport.cli import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['refit-transport', *command, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert end.code == 0, (command, end.code)\n"
        f"print({engines} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    *helps, imported = done.stdout.splitlines()
    assert sum("Usage: refit-transport" in line for line in helps) == len(commands)
    assert imported == "set()"


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        (
            "import refit_transport",
            ("torch", "vllm", "megatron", "ray", "pydantic", "omegaconf", "yaml", "typer", "numpy"),
        ),
        ("import refit_transport.cli", ("torch", "vllm", "megatron", "ray", "pydantic", "omegaconf", "yaml", "numpy")),
        ("import refit_transport.config.load", ("torch", "vllm", "megatron", "ray", "transformers")),
    ],
)
def test_imports_stay_light(statement: str, forbidden: tuple[str, ...]) -> None:
    script = f"{statement}; import sys; print([name for name in {forbidden} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
