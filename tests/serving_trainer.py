"""A Megatron policy on two tensor-parallel ranks that refits what serves it; torchrun starts it.

Prints a JSON line for each version: what everybody who serves answers, and what the policy computes of these answers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import requests
import torch.distributed as dist
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm_servers import PROMPT, complete

from refit_transport import RefitSettings, RefitTransportError
from refit_transport.cluster.training import TrainingWorker
from refit_transport.integrations.vllm_server import ServerClient
from refit_transport.integrations.vllm_trainer import RefitSource, RefitTrainerInitInfo
from refit_transport.layout.parallelism import MegatronParallelism

LENGTH = 6


class StrikingClient(ServerClient):
    """Kills a server's process group when all servers have opened an update and none has received."""

    def __init__(self, *urls: str, group: int) -> None:
        super().__init__(*urls)
        self._group = group

    def update_weights(self, update_info: Any) -> None:
        os.killpg(self._group, signal.SIGKILL)
        super().update_weights(update_info)


@contextmanager
def paused_server(url):
    """What vLLM's own HTTP client leaves to who uses it."""
    requests.post(f"{url}/pause", params={"mode": "keep", "clear_cache": "false"}, timeout=60).raise_for_status()
    yield
    requests.post(f"{url}/reset_prefix_cache", params={"reset_running_requests": "true"}, timeout=60).raise_for_status()
    requests.post(f"{url}/resume", timeout=60).raise_for_status()


@contextmanager
def paused_actor(actor):
    import ray

    ray.get(actor.pause.remote(), timeout=60)
    yield
    ray.get(actor.go_on.remote(), timeout=60)


@contextmanager
def not_paused():
    """Our client pauses by itself."""
    yield


def engines_of(arguments: argparse.Namespace) -> tuple[Any, Callable[[], Any], list[Callable[[], Any]]]:
    """The client, what pauses around a refit, and how each one that serves is asked."""
    at = arguments.at
    asks = [partial(complete, url, arguments.model, LENGTH) for url in at]
    if arguments.client == "http":
        return HTTPVLLMWeightSyncClient(at[0]), partial(paused_server, at[0]), asks
    if arguments.client == "ray":
        import ray

        ray.init(address=os.environ["SERVING_CLUSTER"], namespace="serving", log_to_driver=False)
        actor = ray.get_actor(at[0])
        ask = lambda: ray.get(actor.complete.remote(PROMPT, LENGTH), timeout=60)  # noqa: E731
        return RayVLLMWeightSyncClient(actor), partial(paused_actor, actor), [ask]
    client = StrikingClient(*at, group=arguments.strike) if arguments.strike else ServerClient(*at)
    return client, not_paused, asks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--client", choices=("servers", "http", "ray"), required=True)
    parser.add_argument("--at", nargs="+", required=True)
    parser.add_argument("--engine-ranks", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--strike", type=int, help="kill this process group in the first refit")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = TrainingWorker(
        rank=rank,
        world_size=world_size,
        init_method="env://",
        checkpoint=arguments.model,
        parallelism=MegatronParallelism(tensor=world_size),
        timeout_s=120.0,
    )
    client, paused, asks = engines_of(arguments) if rank == 0 else (None, not_paused, [])
    engine = WeightTransferTrainerFactory.trainer_init(
        RefitTrainerInitInfo(
            rank=rank,
            engine_ranks=arguments.engine_ranks,
            settings=RefitSettings(coverage="all", verify="full", timeout_s=60.0),
        ),
        client=client,
        source=RefitSource(worker.source()),
    )
    for seed in arguments.seeds:
        worker.set_weights(seed)
        began = time.monotonic()
        try:
            with paused():
                engine.send_weights()
        except RefitTransportError as error:
            tell({"rank": rank, "error": str(error), "seconds": time.monotonic() - began})
            break
        answers = [[ask() for ask in asks]]
        dist.broadcast_object_list(answers, src=0)
        computed = worker.logprobs([[*PROMPT, *tokens] for tokens, _ in answers[0]])
        if rank == 0:
            trained = [row[len(PROMPT) - 1 :] for row in computed]
            tell({"version": engine.version, "answers": answers[0], "trained": trained})
    engine.shutdown()
    worker.shutdown()


def tell(found: dict[str, Any]) -> None:
    # One write: both ranks may print at once.
    os.write(1, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
