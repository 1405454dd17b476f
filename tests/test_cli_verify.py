"""`refit-transport verify`: what it prints of a job's findings, and its exit codes; a real job is in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from refit_transport.cli import app
from refit_transport.errors import WorkerError
from refit_transport.report import PlanSummary, RankReport, RefitReport
from refit_transport.verification import Comparison, Difference

pytest.importorskip("ray")

from refit_transport.cluster import run as job
from refit_transport.cluster.run import VerifiedJob

DEMO = str(Path(__file__).parents[1] / "configs/demo.yaml")
REPORT = RefitReport(
    1,
    0.25,
    PlanSummary((), {}, 0, 0, {}, ()),
    (
        RankReport(0, "source", "here", {}, 10, 0),
        RankReport(1, "target", "here", {}, 0, 4, verified=6),
        RankReport(2, "target", "here", {}, 0, 6, verified=7),
    ),
)
TRAINED = Comparison(-1, 13, 4_000_000, 5, (Difference("target", "lm_head.weight", "[0:4, 0:8]", 0, 1),))
EQUAL = Comparison(1, 13, 4_000_000, 0)


@pytest.fixture
def verify(monkeypatch):
    """Runs the command on a job that has these findings, or that fails."""

    def run(found: VerifiedJob | Exception, *arguments: str) -> tuple[int, str, str]:
        def verified(config, *, ray_address, announce):
            assert config.settings.verify == "full"
            announce("the refit is being compared")
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(job, "verify_job", verified)
        result = CliRunner().invoke(app, ["verify", DEMO, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_equal_sides_are_three_lines_and_code_0(verify):
    code, out, err = verify(VerifiedJob(TRAINED, REPORT, EQUAL))
    assert code == 0
    assert out.splitlines() == [
        "trained, before the refit: 5 of 13 boxes (4.000 MB) differ from the trainer's",
        "refit: version 1, 0.250 s, 13 boxes verified on arrival",
        "after it: all 13 boxes that the engines serve (4.000 MB) equal the trainer's",
    ]
    assert err.strip() == "the refit is being compared"


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            Difference("target", "lm_head.weight", "[0:4, 0:8]", 0, 2),
            "verification of version 1: tensor lm_head.weight, box [0:4, 0:8] on target rank 2 "
            "differs from source rank 0",
        ),
        (
            Difference("derived", "model.layers.0.self_attn.W_UV", "[0:2, 0:3, 0:4]", -1, 1),
            "verification of version 1: tensor model.layers.0.self_attn.W_UV, box [0:2, 0:3, 0:4] on target rank 1 "
            "differs from what this rank's weights give",
        ),
    ],
)
def test_what_differs_is_named_and_code_1(verify, first, message):
    later = Difference("target", "model.norm.weight", "[0:8]", 0, 2)
    after = Comparison(1, 13, 4_000_000, 2, (first, later))
    code, out, err = verify(VerifiedJob(TRAINED, REPORT, after))
    assert code == 1
    assert out.splitlines()[2:4] == ["after it: 2 of 13 boxes (4.000 MB) differ from the trainer's", f"  {message}"]
    assert "model.norm.weight" in out.splitlines()[4]
    assert err.splitlines()[-1] == f"refit-transport: {message}"
    code, out, err = verify(VerifiedJob(TRAINED, REPORT, after), "--json")
    assert code == 1
    found = json.loads(out)
    assert found["equal"] is False
    assert found["after"]["differing"] == 2
    assert found["after"]["first"][0] == {
        "what": first.what,
        "tensor": first.tensor,
        "box": first.box,
        "source_rank": first.source_rank,
        "rank": first.rank,
    }
    assert err.splitlines()[-1] == f"refit-transport: {message}"


def test_programs_get_both_comparisons_and_the_report(verify):
    code, out, _ = verify(VerifiedJob(TRAINED, REPORT, EQUAL), "--json")
    found = json.loads(out)
    assert (code, found["equal"], found["report"]) == (0, True, json.loads(json.dumps(REPORT.to_json())))
    assert Comparison.from_json(found["before"]) == TRAINED
    assert Comparison.from_json(found["after"]) == EQUAL


def test_what_could_not_be_compared_is_listed_by_its_reason(verify):
    private = {
        f"model.layers.{layer}.mlp.down_proj.weight": "rank 1's engine keeps its own layout" for layer in range(6)
    }
    after = Comparison(1, 7, 1_000, 0, (), {**private, "extra": "the target takes it whole: it is computed"})
    _, out, _ = verify(VerifiedJob(TRAINED, REPORT, after))
    named = ", ".join(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4))
    assert out.splitlines()[3:] == [
        f"not compared while served, because rank 1's engine keeps its own layout: {named} and 2 more",
        "not compared while served, because the target takes it whole: it is computed: extra",
    ]


def test_training_that_changed_nothing_is_told_because_it_proves_little(verify):
    code, out, _ = verify(VerifiedJob(EQUAL, REPORT, EQUAL))
    assert code == 0
    assert "raise refit_run.steps_per_refit" in out.splitlines()[1]


def test_a_worker_that_fails_is_one_message_and_code_1(verify):
    error = WorkerError("policy", 1, "send", "it is gone")
    code, out, err = verify(error)
    assert (code, out) == (1, "")
    assert err.split("\n", 1)[1].strip() == f"refit-transport: {error}"
