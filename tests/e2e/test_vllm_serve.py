"""A plain FSDP2 script refits a running vLLM server over HTTP, while clients keep asking it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
from rank_pool import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from refit_transport.testing.models import save_tiny_model

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PROMPT, LENGTH, STEPS = [5, 9, 2, 33, 7], 8, 3
TOLERANCE = 1e-4
SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
}
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = Path(save_tiny_model(tmp_path_factory.mktemp("model"), kind="dense", seed=3, num_hidden_layers=2))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2").save_pretrained(folder)
    return folder


@pytest.fixture
def server(model, tmp_path):
    """The base URL of a running server. vllm-cpu lacks the metadata that the `vllm` command asks for."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--weight-transfer-config", json.dumps({"backend": "refit_transport"})]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | SERVER, stdout=log, stderr=subprocess.STDOUT)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while not is_up(url):
            assert process.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            assert time.monotonic() < end, "the server didn't start"
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(url):
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def complete(url, model, length):
    """Greedy tokens and their log-probabilities."""
    asked = {"model": str(model), "prompt": PROMPT, "max_tokens": length, "temperature": 0, "logprobs": 1}
    answer = requests.post(f"{url}/v1/completions", json={**asked, "ignore_eos": True}, timeout=120)
    answer.raise_for_status()
    found = answer.json()["choices"][0]["logprobs"]
    return [int(token.removeprefix("t")) for token in found["tokens"]], found["token_logprobs"]


def equal(one, other):
    return one[0] == other[0] and all(abs(a - b) <= TOLERANCE for a, b in zip(one[1], other[1], strict=True))


def test_servers_follow_the_example_while_clients_keep_asking(server, model, tmp_path):
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
    script = [str(ROOT / "docs" / "howto" / "vllm_serve.py"), "--model", str(model), "--url", server]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command += [*script, "--steps", str(STEPS), "--save", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SERVER["PYTHONPATH"]}
    trained = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
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
        env=os.environ | SERVER,
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
