"""A plain FSDP2 script refits a running vLLM server over HTTP, while clients keep asking it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests
from vllm_servers import ENVIRONMENT, PROMPT, complete, save_served_model, serving, torchrun

pytestmark = pytest.mark.e2e
EXAMPLE = str(Path(__file__).parents[2] / "docs" / "howto" / "vllm_serve.py")
LENGTH, STEPS = 8, 3
TOLERANCE = 1e-4
# Engines that have never seen a refit, one after the other.
COLD = """
import json, sys
from refit_transport.cluster.generation import EngineConfig, GenerationWorker
from rank_pool import free_port
from vllm import SamplingParams

found = []
for folder in sys.argv[1:]:
    config = EngineConfig(folder, max_model_len=64)
    worker = GenerationWorker(rank=0, world_size=1, host="127.0.0.1", port=free_port(), config=config)
    wanted = SamplingParams(max_tokens={length}, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
    [output] = worker._llm.generate([{{"prompt_token_ids": {prompt}}}], wanted, use_tqdm=False)
    [chosen] = output.outputs
    logprobs = [step[token].logprob for token, step in zip(chosen.token_ids, chosen.logprobs)]
    found.append([list(chosen.token_ids), logprobs])
    worker.shutdown()
print(json.dumps(found))
"""


@pytest.fixture
def model(tmp_path):
    return save_served_model(tmp_path / "model")


def equal(one, other):
    return one[0] == other[0] and all(abs(a - b) <= TOLERANCE for a, b in zip(one[1], other[1], strict=True))


def test_a_server_follows_the_example_while_clients_keep_asking(model, tmp_path):
    with serving(model, tmp_path / "server.log") as server:
        _assert_follows(server.url, model, tmp_path)


def _assert_follows(server, model, tmp_path):
    before = complete(server, model, LENGTH)
    asked, failed, done = [], [], threading.Event()

    def ask():
        while not done.is_set():
            try:
                asked.append(complete(server, model, 1))
            except requests.RequestException as error:
                failed.append(error)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    trained = torchrun(EXAMPLE, "--model", str(model), "--url", server, "--steps", str(STEPS), "--save", str(tmp_path))
    done.set()
    client.join(120)
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert [line.split(", ")[1] for line in trained.stdout.splitlines()] == [
        f"version {v} served" for v in range(STEPS)
    ]
    assert failed == []
    after = complete(server, model, LENGTH)
    assert requests.get(f"{server}/weight_info", timeout=10).json() == {"weight_version": str(STEPS - 1)}
    assert requests.get(f"{server}/is_paused", timeout=10).json() == {"is_paused": False}

    folders = [str(model), *(str(tmp_path / f"version-{version}") for version in range(STEPS))]
    code = COLD.format(prompt=PROMPT, length=LENGTH)
    cold = subprocess.run(
        [sys.executable, "-c", code, *folders],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    versions = json.loads(cold.stdout.splitlines()[-1])
    assert all(not equal(one, other) for one, other in zip(versions[1:], versions, strict=False))
    assert equal(before, versions[0])
    assert equal(after, versions[-1])
    # Each answer in between is of one version, and none is older than the one before it.
    first = [([tokens[0]], [logprobs[0]]) for tokens, logprobs in versions]
    served = [next((v for v, cold in enumerate(first) if equal(answer, cold)), None) for answer in asked]
    assert None not in served
    assert served == sorted(served)
    assert len(set(served)) > 1
