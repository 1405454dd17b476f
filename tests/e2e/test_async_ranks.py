"""An engine of two ranks that generates in the background: vLLM's processes of both are children of one actor."""

from __future__ import annotations

from pathlib import Path

import pytest
from refit_jobs import ENVIRONMENT, TIMEOUT_S, Case, wrong_parameters
from test_async_generation import AsyncJob, errors, long_requests, started

from refit_transport.cluster.samplers import submit_to
from refit_transport.cluster.workers import WorkerGroup
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.testing.models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_an_engine_of_two_ranks(groups, tmp_path):
    group = WorkerGroup("engine-async-2", 1, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
    case = Case("dense", Cut(tensor=2), tensor=2, max_model_len=512, model={"max_position_embeddings": 512})
    folder = save_tiny_model(tmp_path, kind="dense", seed=3, **dict(case.model))
    pair = AsyncJob(case, Path(folder), groups["policy"], [group])
    pair.ranks_per_actor = 2
    try:
        pair.start()
        submission = submit_to([group], long_requests(max_tokens=60))
        started(group, submission)
        new = pair.refit("B")
        assert wrong_parameters(pair, pair.weights["B"]) == []
        for sample in submission.take(timeout_s=TIMEOUT_S):
            switch = sample.versions.index(new)
            assert 0 < switch < 60
            assert errors(pair, sample, "A")[:switch].max() < 1e-4
            assert errors(pair, sample, "B")[switch:].max() < 1e-4
        pair.stop()
    finally:
        group.release()
