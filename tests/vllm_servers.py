"""Real vLLM servers in processes of their own, and what a client sees of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
from rank_pool import free_port

from refit_transport.testing.models import save_tiny_model

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [5, 9, 2, 33, 7]
START_S = 240
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "REFIT_TRANSPORT_VLLM_PLAIN_WEIGHTS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
}


def save_served_model(folder: Path) -> Path:
    """A tiny model with a tokenizer, in which token 5 is the word "t5"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny_model(folder, kind="dense", seed=3, num_hidden_layers=2)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2").save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Server:
    """A running server, alone with what it started in a process group."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Ends the server and its engine's processes as a dying machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: Path, log: Path, *, tensor: int = 1, port: int | None = None) -> Iterator[Server]:
    """A server in RL mode that is up. vllm-cpu lacks the metadata that the `vllm` command asks for."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--tensor-parallel-size", str(tensor)]
    command += ["--weight-transfer-config", json.dumps({"backend": "refit_transport"})]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _is_up(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, "the server didn't start"
            time.sleep(0.5)
        yield Server(url, process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def complete(url: str, model: Path | str, length: int) -> tuple[list[int], list[float]]:
    """Greedy tokens after `PROMPT` and their log-probabilities."""
    asked = {"model": str(model), "prompt": PROMPT, "max_tokens": length, "temperature": 0, "logprobs": 1}
    answer = requests.post(f"{url}/v1/completions", json={**asked, "ignore_eos": True}, timeout=120)
    answer.raise_for_status()
    found = answer.json()["choices"][0]["logprobs"]
    return [int(token.removeprefix("t")) for token in found["tokens"]], found["token_logprobs"]


def torchrun(*script: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Two ranks of a training script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
    return subprocess.run(
        [*launcher, "--master-port", str(free_port()), *script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
