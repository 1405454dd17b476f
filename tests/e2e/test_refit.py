"""Real Megatron into real vLLM, bit for bit, for layouts that cross every awkward border."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refit_jobs import ENVIRONMENT, TIMEOUT_S, Case, RunningCase, largest_difference, wrong_parameters
from support_records import supports

from refit_transport.cluster.workers import WorkerGroup
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e

TWO_LAYERS = {"num_hidden_layers": 2}
FOUR_LAYERS = {"num_hidden_layers": 4}
MOE_CUT = Cut(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True)
CASES = {
    "dense TP2 -> TP1": Case("dense", Cut(tensor=2), model=TWO_LAYERS),
    "dense PP2 VPP2 -> TP2": Case("dense", Cut(pipeline=2, virtual_pipeline=2), tensor=2, model=FOUR_LAYERS),
    "tied PP2 -> TP1": Case("dense", Cut(pipeline=2), model={**TWO_LAYERS, "tie_word_embeddings": True}),
    "MoE TP2 EP2 ETP1 -> TP2": Case("moe", MOE_CUT, tensor=2, model=TWO_LAYERS),
    "MoE EP2 -> TP2 EP": Case("moe", Cut(expert=2), tensor=2, expert_parallel=True, model=TWO_LAYERS),
    "one KV head, TP2 -> TP2": Case("dense", Cut(tensor=2), tensor=2, model={**TWO_LAYERS, "num_key_value_heads": 1}),
    "vocabulary of 251, TP2 -> TP2": Case("dense", Cut(tensor=2), tensor=2, model={**TWO_LAYERS, "vocab_size": 251}),
    "two engines": Case("moe", MOE_CUT, engines=2, model=TWO_LAYERS),
}


@pytest.fixture(params=[pytest.param(case, id=name, marks=supports(**case.row)) for name, case in CASES.items()])
def running(request, groups, tmp_path_factory):
    case = request.param
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind=case.kind, seed=3, **dict(case.model))
    hosts = [groups["engine-tp2"]] if case.tensor == 2 else [groups["engine-a"], groups["engine-b"]]
    job = RunningCase(case, Path(folder), groups["policy"], hosts)
    job.start()
    yield job
    job.stop()


def test_every_rank_serves_exactly_the_policys_weights(running, support_record):
    versions = {}
    for name in ("A", "B"):
        # CPU initialisation makes experts of different ranks and layers of different stages alike.
        running.policy.call("perturb", ord(name))
        running.policy.call("remember", name)
        versions[name] = running.exported()
    assert all(not np.array_equal(versions["A"][name], versions["B"][name]) for name in versions["A"])

    synchronizer = running.synchronizer(coverage="all")
    planned = running.planned(coverage="all")
    for version, name in enumerate("ABAB", start=1):
        running.policy.call("recall", name)
        report = synchronizer.sync(version)
        assert wrong_parameters(running, versions[name]) == []
        assert largest_difference(running) <= 1e-4
        assert report.version == version
        assert report.summary.whole == {}
        assert report.summary == planned
        received = {rank.rank: rank.received_bytes for rank in report.ranks if rank.received_bytes}
        assert received == planned.received_by_rank
        assert report.summary.network_bytes < report.summary.old_way_received_bytes
        assert sum(rank.verified for rank in report.ranks) > 0
    proof = "bit-exact on every rank, A-B-A-B, log-probabilities of the trainer"
    support_record(shard_to_shard=report.summary.shard_to_shard, proof=proof)

    synchronizer = running.synchronizer(coverage="ffn")
    for version, name in enumerate("AB", start=5):
        running.policy.call("recall", name)
        report = synchronizer.sync(version)
        assert wrong_parameters(running, versions[name]) == []
        assert report.summary == running.planned(coverage="ffn")
        [whole] = report.summary.whole.values()
        assert not any("_proj.weight" in name and ".mlp." in name for name in whole)
    assert largest_difference(running) <= 1e-4


@pytest.fixture
def stock_engine(groups):
    """Engine ranks in new processes: the plain-weights mode of a process is for its whole life."""
    group = WorkerGroup("engine-stock", 2, resources={"CPU": 0.5}, environment=ENVIRONMENT, timeout_s=TIMEOUT_S)
    yield group
    group.release()


def test_stock_kernels_are_staged_and_follow(groups, stock_engine, tmp_path_factory):
    """vLLM's prepacked CPU kernels: nothing is written in place, yet what is computed follows A -> B -> A -> B."""
    case = Case("moe", MOE_CUT, tensor=2, plain_weights=False, model=TWO_LAYERS)
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind="moe", seed=3, **TWO_LAYERS)
    job = RunningCase(case, Path(folder), groups["policy"], [stock_engine])
    job.start()
    for name in "AB":
        job.policy.call("perturb", ord(name))
        job.policy.call("remember", name)
    for coverage, names, first in (("all", "ABAB", 1), ("ffn", "AB", 5)):
        synchronizer = job.synchronizer(coverage=coverage)
        for version, name in enumerate(names, start=first):
            job.policy.call("recall", name)
            report = synchronizer.sync(version)
            assert largest_difference(job) <= 1e-4
            staged = {layer for layer, reason in report.private_layers.items() if reason.startswith("stage: ")}
            assert {layer.rsplit(".", 1)[-1] for layer in staged} >= {"qkv_proj", "o_proj", "routed_experts"}
    job.stop()
