"""`refit-transport bench`: what it refuses, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import refit_transport.cli_bench as cli_bench
from refit_transport.bench import planning
from refit_transport.bench.bounds import LowerBound
from refit_transport.bench.full_size import FullSize
from refit_transport.bench.isolation import check_requirements
from refit_transport.bench.results import CaseResult, LabResult, Repetition, Uplink, VariantResult, Verdict
from refit_transport.bench.workload import Side, transformer
from refit_transport.cli import app
from refit_transport.errors import ConfigError, MissingDependencyError

TIMES = (0.5, 0.4, 0.7)
OURS = VariantResult(
    "ours",
    LowerBound(0.35, "into node 1"),
    1.0,
    tuple(Repetition(seconds, {"network": seconds}, 0.01, 0.5, 0.2) for seconds in TIMES),
    (Uplink(0, "out", 1000, 1010, 0),),
    (1 << 20,),
)
FINE = Verdict("ours / bound", "<= 2", 1.43, holds=True)
MISSED = Verdict("flat / ours", ">= 3.7", 3.5, holds=False)


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def lab(monkeypatch):
    """A lab that finds what it is told; `requests` lists what it was asked."""
    requests = []

    def set_verdicts(*verdicts):
        found = LabResult((CaseResult("tp4-tp8", "TP4 -> TP8", 10**8, 12, (OURS,), verdicts),), 3, (0.1, 0.2))

        def run(request, *, announce):
            requests.append(request)
            announce("measuring")
            return found

        monkeypatch.setattr(cli_bench, "run_lab", run)
        return requests

    return set_verdicts


def test_without_anything_to_do_it_says_what_there_is():
    code, _, err = bench()
    assert code == 2
    assert "give --lab, --plan, --gpu or --ranks CONFIG" in err


def test_an_unknown_case_is_refused_before_anything_runs(lab):
    requests = lab(FINE)
    code, _, err = bench("--lab", "--case", "tp4-tp9")
    assert (code, requests) == (2, [])
    assert "did you mean 'tp4-tp8'" in err


def test_everything_that_the_lab_lacks_is_one_message(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ConfigError) as caught:
        check_requirements()
    assert "(got not found); install iproute2" in str(caught.value)
    assert "(got uid 1000); run it as root" in str(caught.value)
    code, out, err = bench("--lab", "--case", "tp4-tp8")
    assert (code, out) == (2, "")
    assert "run it as root" in err
    assert "Traceback" not in err


def test_tables_for_people_and_no_files(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    requests = lab(FINE)
    code, out, err = bench("--lab", "--case", "tp4-tp8", "--reps", "3")
    assert code == 0
    assert [case.name for case in requests[0].cases] == ["tp4-tp8"]
    assert requests[0].repetitions == 3
    for words in ("500 ms", "350 ms", "70.0%", "60%", "1.0 MiB", "ours / bound", "holds"):
        assert words in out
    assert "measuring" in err
    assert list(tmp_path.iterdir()) == []


def test_a_missed_limit_is_named_and_fails(lab):
    lab(FINE, MISSED)
    code, out, err = bench("--lab")
    assert code == 1
    assert "missed: tp4-tp8: flat / ours: 3.5, must be >= 3.7" in err
    assert "MISSED" in out


def test_json_for_programs(lab):
    lab(FINE, MISSED)
    code, out, _ = bench("--lab", "--json")
    found = json.loads(out)["lab"]
    assert code == 1
    variant = found["cases"][0]["variants"][0]
    assert (variant["seconds"], variant["of_bound"]) == (0.5, pytest.approx(0.7))
    assert found["misses"] == ["tp4-tp8: flat / ours: 3.5, must be >= 3.7"]


def test_a_folder_gets_json_tables_and_a_picture(lab, tmp_path):
    pytest.importorskip("matplotlib")
    lab(FINE)
    code, _, err = bench("--lab", "--output", str(tmp_path / "new" / "folder"))
    assert code == 0, err
    written = {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()}
    assert written.keys() == {"lab.json", "lab.txt", "lab.png"}
    assert json.loads(written["lab.json"])["cases"][0]["name"] == "tp4-tp8"
    assert b"of bound" in written["lab.txt"]
    assert written["lab.png"].startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured_for_nothing(lab, tmp_path, monkeypatch):
    requests = lab(FINE)

    def missing():
        raise MissingDependencyError("matplotlib", "the plot of a benchmark", "bench")

    monkeypatch.setattr(cli_bench, "check_plotting", missing)
    code, _, err = bench("--lab", "--output", str(tmp_path))
    assert (code, requests) == (2, [])
    assert "pip install 'refit-transport[bench]'" in err


def test_planning_is_timed_step_by_step(monkeypatch, capsys):
    model, source, target = transformer(layers=1, hidden=16), Side(tp=4), Side(tp=8)
    sides = FullSize(
        source.manifest("source", model, first_rank=0), target.manifest("target", model, first_rank=4)
    )  # fmt: skip
    monkeypatch.setattr(planning, "FULL_SIZE", {"small": lambda: sides})
    steps = []
    for task in planning._TASKS:
        planning._main("small", task)
        found = json.loads(capsys.readouterr().out)
        assert found["peak_memory"] > 50e6
        assert sum(found["seconds"].values()) > 0
        steps.append(set(found["seconds"]))
    assert steps == [{"route", "plan"}, {"plan", "schedule", "check plan", "check schedule"}, {"source", "target"}]


def test_a_part_over_its_limits_is_a_miss():
    part = planning.Part("m", "p", {"a": 0.7, "b": 0.6}, 2.0, 3 << 30, 1.2, 2 << 30)
    assert part.misses == ["m: p: 1.30 s, must be <= 1.2 s", "m: p: 3.00 GiB, must be <= 2.00 GiB"]
    assert replace(part, most_seconds=1.4, most_memory=None).misses == []
