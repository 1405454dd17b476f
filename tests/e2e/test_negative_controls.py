"""What a wrong refit looks like: each kind of mistake is seen by the parameter comparison and by log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from refit_jobs import Case, RunningCase, largest_difference, wrong_parameters
from test_refit import MOE_CUT

from refit_transport.errors import VerificationError, WorkerError
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def synced(groups, tmp_path_factory):
    """A MoE job whose engines serve version 1; the tests change the policy afterwards and don't refit."""
    case = Case("moe", MOE_CUT, tensor=2, model={"num_hidden_layers": 2, "initializer_range": 0.1})
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind="moe", seed=5, **dict(case.model))
    job = RunningCase(case, folder, groups["policy"], [groups["engine-tp2"]])
    job.start()
    job.policy.call("perturb", 1)
    job.policy.call("remember", "good")
    job.synchronizer(coverage="all").sync(1)
    assert wrong_parameters(job, job.exported()) == []
    assert largest_difference(job) <= 1e-4
    yield job
    job.stop()


@pytest.mark.parametrize(
    ("mistake", "arguments", "parameter"),
    [
        ("swap_pieces", (f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight", 3, 3), "w13_weight"),
        ("swap_pieces", (f"{EXPERTS}.down_proj.weight", f"{EXPERTS}.down_proj.weight", 1, 2), "w2_weight"),
        ("scale_pieces", ("model.layers.0.self_attn.v_proj.weight", 0.9), "qkv_proj.weight"),
        ("scale_pieces", ("model.layers.1.input_layernorm.weight", 1.1), "input_layernorm.weight"),
        ("scale_pieces", ("lm_head.weight", 1.1), "lm_head.weight"),
    ],
)
def test_a_mistake_is_seen(synced, mistake, arguments, parameter):
    synced.policy.call(mistake, *arguments)
    try:
        wrong = wrong_parameters(synced, synced.exported())
        assert wrong
        assert all(parameter in name for name in wrong)
        assert largest_difference(synced) > 1e-4
    finally:
        synced.policy.call("recall", "good")
    assert wrong_parameters(synced, synced.exported()) == []


def test_the_oracle_itself_sees_a_single_flipped_element(synced):
    exported = {name: array.copy() for name, array in synced.exported().items()}
    exported["model.norm.weight"][0] = np.nextafter(exported["model.norm.weight"][0], 9.0)
    assert wrong_parameters(synced, exported) == ["rank 0: model.norm.weight", "rank 1: model.norm.weight"]


def test_a_stale_layer_is_seen(synced):
    synced.policy.call("perturb", 2)
    synced.policy.call("remember", "next")
    synced.policy.call("recall", "good")
    synced.policy.call("recall_layer", "next", 1)
    try:
        wrong = wrong_parameters(synced, synced.exported())
        assert wrong
        assert all(".layers.1." in name for name in wrong)
        assert largest_difference(synced) > 1e-4
    finally:
        synced.policy.call("recall", "good")


def test_a_running_job_compares_both_sides_on_demand(synced):
    synchronizer, [engine] = synced.synchronizer(coverage="all"), synced.engines
    equal = synchronizer.compare().require_equal()
    served = sum(array.nbytes for weights in synced.served() for array in weights.values())
    assert (equal.nbytes, equal.differing, dict(equal.unverified)) == (served, 0, {})

    synced.policy.call("swap_pieces", f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight", 3, 3)
    swapped = synchronizer.compare()
    synced.policy.call("recall", "good")
    # One expert's two matrices, each cut over both ranks of the engine.
    assert {found.tensor for found in swapped.first} == {f"{EXPERTS}.{name}_proj.weight" for name in ("gate", "up")}
    assert swapped.differing == 4

    for rank, parameter, tensor in (
        (1, "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        (0, "model.norm.weight", "model.norm.weight"),
    ):
        engine.call("flip", rank, parameter)
        with pytest.raises(
            VerificationError, match=f"tensor {tensor}, box .* on target rank {2 + rank} differs"
        ) as found:
            synchronizer.compare().require_equal()
        engine.call("flip", rank, parameter)
        assert found.value.source_rank in (0, 1)
    assert synchronizer.compare().differing == 0
    synchronizer.sync(2)
    assert synchronizer.compare().require_equal().version == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_failed_refit_engines_stay_fenced_and_the_next_one_is_exact(synced, rank):
    synchronizer = synced.synchronizer(coverage="all", timeout_s=20.0)
    synchronizer.prepare()
    synced.policy.call("perturb", 3 + rank)
    synced.policy.call("refuse_next_send", rank)
    with pytest.raises(WorkerError, match=r"a refusal|no receive completed|peer failure|Connection closed"):
        synchronizer.sync(3 + 10 * rank)
    [engine] = synced.engines
    with pytest.raises(WorkerError, match=r"logprobs.*fenced: a refit is open"):
        engine.call("logprobs", [[1, 2, 3]])
    assert engine.call("version")[0] < 3 + 10 * rank
    synchronizer.sync(4 + 10 * rank)
    assert wrong_parameters(synced, synced.exported()) == []
    assert largest_difference(synced) <= 1e-4
    assert engine.call("version") == [4 + 10 * rank] * 2
