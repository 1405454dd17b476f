"""`refit-transport verify` as a user starts it, on a job of two engine ranks."""

from __future__ import annotations

import json

import pytest
from test_run_command import Run, with_changes

pytestmark = pytest.mark.e2e


def test_a_real_job_is_compared_before_and_after_its_refit(tmp_path):
    config = with_changes(
        cluster__gpus_per_node=3,
        policy__generation__colocated={"enabled": False, "resources": {"gpus_per_node": 2}},
        policy__generation__vllm_cfg={"tensor_parallel_size": 2},
    )
    code, output, errors = Run(tmp_path, config, "--json", command=("verify", "job.yaml")).finish()
    assert code == 0, errors
    found = json.loads(output)
    before, after = found["before"], found["after"]
    assert found["equal"] is True
    assert (before["version"], after["version"]) == (-1, 1)
    # Training has changed every tensor; both ranks serve all boxes that they compare.
    assert before["boxes"] == before["differing"] == after["boxes"] > 20
    assert (after["differing"], after["first"], after["unverified"]) == (0, [], {})
    assert before["nbytes"] == after["nbytes"]
    assert {difference["what"] for difference in before["first"]} == {"target"}
    verified = {rank["rank"]: rank["verified"] for rank in found["report"]["ranks"]}
    assert sum(verified.values()) == after["boxes"]
    assert "comparing both sides after it" in errors
