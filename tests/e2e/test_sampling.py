"""Samples of refitted vLLM engines: what they are drawn from, what they depend on, and what the cache may not do."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_oracle import token_logprobs
from refit_jobs import TIMEOUT_S, Case, RunningCase
from safetensors.torch import save_file

from refit_transport.cluster.samplers import sample_on
from refit_transport.cluster.sampling import SampleRequest
from refit_transport.cluster.workers import collect
from refit_transport.errors import WorkerError
from refit_transport.layout.parallelism import MegatronParallelism as Cut
from refit_transport.rl.seeds import sample_seed
from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e

# vLLM's cache holds whole blocks, on CPU of 128 tokens.
BLOCK = 128
PREFIX = tuple(np.random.default_rng(0).integers(0, 256, BLOCK + 20).tolist())
STOP = tuple(range(0, 256, 16))


def requests(*, prompts=4, samples=3, prefix=(), temperature=1.0, stop=STOP, max_tokens=12):
    return [
        SampleRequest(
            prompt=(*prefix, *range(10 * group, 10 * group + 3 + group)),
            seed=sample_seed(7, step=0, prompt=group, sample=number),
            group=group,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=stop,
        )
        for group in range(prompts)
        for number in range(samples)
    ]


@pytest.fixture(scope="module")
def job(groups, tmp_path_factory):
    """An engine of two ranks and one of a single rank, which serve version 1."""
    case = Case("dense", Cut(tensor=2), engines=2, max_model_len=256, model={"max_position_embeddings": 256})
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), kind="dense", seed=3, **dict(case.model))
    running = RunningCase(case, Path(folder), groups["policy"], [groups["engine-tp2"], groups["engine-a"]])
    running.start()
    for name in "AB":
        running.policy.call("perturb", ord(name))
        running.policy.call("remember", name)
    running.policy.call("recall", "A")
    running.shared = running.synchronizer(coverage="all")
    running.shared.sync(1)
    yield running
    running.stop()


def drawn(samples):
    """All that a sample says but its log-probabilities."""
    return [(s.prompt, s.response, s.versions, s.seed, s.group, s.finished) for s in samples]


def largest_first_difference(samples, others):
    """Of the log-probabilities of first tokens, where both drew the same one."""
    pairs = [(a, b) for a, b in zip(samples, others, strict=True) if a.response[0] == b.response[0]]
    return max(abs(a.generation_logprobs[0] - b.generation_logprobs[0]) for a, b in pairs)


def differences(samples, others):
    return [
        abs(a - b)
        for sample, other in zip(samples, others, strict=True)
        for a, b in zip(sample.generation_logprobs, other.generation_logprobs, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(job, temperature):
    asked = requests(temperature=temperature)
    samples = sample_on(job.engines, asked, timeout_s=TIMEOUT_S)
    given = token_logprobs(
        job.folder, job.exported(), [sample.tokens for sample in samples], temperature=temperature or 1.0
    )
    for request, sample, rows in zip(asked, samples, given, strict=True):
        assert (sample.prompt, sample.seed, sample.group) == (request.prompt, request.seed, request.group)
        assert set(sample.versions) == {1}
        stops = [token in STOP for token in sample.response]
        assert not any(stops[:-1])
        assert sample.finished == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(sample.response) == request.max_tokens
        rows = rows[len(sample.prompt) - 1 :]
        chosen = rows[np.arange(len(sample.response)), sample.response]
        assert np.abs(chosen - sample.generation_logprobs).max() < 1e-5
        if temperature == 0.0:
            assert sample.response == tuple(rows.argmax(axis=1))
    if temperature:
        assert {sample.finished for sample in samples} == {"stop", "length"}
        assert len({sample.response for sample in samples}) > 8


def test_a_sample_depends_on_its_own_request_only(job):
    """Tokens are the same in every batch and on every engine; log-probabilities up to rounding (fp32)."""
    asked = requests()
    whole, single = job.engines
    by_rank = whole.call("sample", asked)
    assert by_rank[0] == by_rank[1]
    expected = by_rank[0]
    others = {
        "again": whole.call("sample", asked)[0],
        "the other engine": single.call("sample", asked)[0],
        "both engines": sample_on(job.engines, asked, timeout_s=TIMEOUT_S),
        "reversed": single.call("sample", asked[::-1])[0][::-1],
        "one by one": [single.call("sample", [request])[0][0] for request in asked],
        "among others": whole.call("sample", [*requests(samples=5)[::2], *asked, *asked])[0][-len(asked) :],
    }
    for name, samples in others.items():
        assert drawn(samples) == drawn(expected), name
        assert max(differences(samples, expected)) <= 1e-5, name
    reseeded = single.call("sample", [replace(request, seed=request.seed + 1) for request in asked])[0]
    assert all(a.response != b.response for a, b in zip(reseeded, expected, strict=True))


@pytest.mark.parametrize("token", [256, -1])
def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_goes_on(job, token):
    whole, _ = job.engines
    with pytest.raises(WorkerError, match=f"token {token}, and the model has tokens 0 to 255"):
        whole.call("sample", [SampleRequest((1, token), 0, 0, 4)])
    with pytest.raises(WorkerError, match=f"token {token}, and the model has tokens 0 to 255"):
        whole.call("logprobs", [[1, token]])
    assert len(whole.call("sample", requests(prompts=1))[0]) == 3


def test_the_prefix_cache_never_outlives_its_weights(job, groups, tmp_path):
    asked, [_, engine] = requests(prefix=PREFIX, stop=(), max_tokens=4), job.engines
    engine.call("sample", asked)
    first = engine.call("sample", asked)[0]
    assert engine.call("cached_prompt_tokens") == [BLOCK * len(asked)]

    # The control: without the reset, what the old weights cached is found and used.
    job.policy.call("recall", "B")
    engine.call("skip_next_cache_reset")
    job.shared.sync(2)
    stale = engine.call("sample", asked)[0]
    assert engine.call("cached_prompt_tokens") == [BLOCK * len(asked)]

    job.shared.sync(3)
    renewed = engine.call("sample", asked)[0]
    # The first prompt computes the block anew, the others find it.
    assert engine.call("cached_prompt_tokens") == [BLOCK * (len(asked) - 1)]
    tensors = {name: torch.from_numpy(array.copy()) for name, array in job.exported().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(job.folder / "config.json", tmp_path)
    fresh = groups["engine-b"]
    collect([job.building(fresh, tmp_path)], timeout_s=TIMEOUT_S)
    expected = fresh.call("sample", asked)[0]
    fresh.call("shutdown")
    assert [(s.response, s.generation_logprobs) for s in renewed] == [
        (s.response, s.generation_logprobs) for s in expected
    ]
    assert {version for sample in renewed for version in sample.versions} == {3}
    assert largest_first_difference(stale, expected) > 1e-3
    assert largest_first_difference(first, expected) > 1e-3
