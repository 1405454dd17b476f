"""The fence around NeMo RL's engines, and what a refit asks of vLLM, on an engine that writes it down."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from refit_transport.cluster.generation import RefitAddress
from refit_transport.errors import SeamError, WorkerError
from refit_transport.integrations.nemo_rl.engine import AsyncEngine, SyncEngine

ADDRESS = RefitAddress("host", 1, 2, 4, 10.0, "secret")


class SyncLLM:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.llm_engine = self
        self.is_reset = True

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[None]:
        self.log.append(function.__name__)
        return [None]

    def reset_prefix_cache(self, **named: Any) -> bool:
        self.log.append(" ".join(["reset_prefix_cache", *(f"{key}={value}" for key, value in named.items())]))
        return self.is_reset

    def reset_encoder_cache(self) -> None:
        self.log.append("reset_encoder_cache")

    def generate(self) -> str:
        return "tokens"


class AsyncLLM(SyncLLM):
    """The same with coroutines."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("collective_rpc", "reset_prefix_cache", "reset_encoder_cache"):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            return found(*arguments, **named)

        return call

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.log.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self.log.append("resume")


def run(made: Any, method: str, *arguments: Any) -> Any:
    found = getattr(made, method)(*arguments)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def made(kind: str, **options: Any) -> tuple[Any, Any, Any]:
    llm = AsyncLLM() if kind == "async" else SyncLLM()
    actor = SimpleNamespace(llm=llm, cfg={})
    options = {"drafts": False, "keeps_kv_cache": False, **options}
    engine = (AsyncEngine if kind == "async" else SyncEngine)(actor, rank=0, node="", **options)
    return engine, actor, llm


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_refit_leaves_nothing_cached_of_the_old_weights(kind: str) -> None:
    engine, actor, llm = made(kind)
    run(engine, "join_refit", ADDRESS)
    assert actor.llm.generate() == "tokens"
    run(engine, "start_refit")
    run(engine, "receive", 1)
    run(engine, "finish_refit", 1)
    middle = ["join", "receive", "finish"]
    assert [line for line in llm.log if line in middle] == middle
    if kind == "sync":
        assert llm.log == [*middle, "reset_prefix_cache", "reset_encoder_cache"]
    else:
        reset = "reset_prefix_cache reset_running_requests=True"
        assert llm.log == ["join", "pause keep False", "receive", "finish", reset, "reset_encoder_cache", "resume"]
    assert run(engine, "version") == 1
    assert actor.llm is llm


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_engine_whose_refit_failed_generates_after_a_complete_one_only(kind: str) -> None:
    engine, actor, llm = made(kind)
    run(engine, "fence", "nothing had begun")
    assert actor.llm.generate() == "tokens"
    run(engine, "start_refit")
    run(engine, "fence", "rank 3 died")
    with pytest.raises(WorkerError, match="fenced: rank 3 died; it serves again after a complete refit"):
        actor.llm.generate()
    run(engine, "start_refit")
    run(engine, "receive", 2)
    with pytest.raises(WorkerError, match="fenced"):
        actor.llm.generate() if kind == "sync" else actor.llm.chat()
    run(engine, "finish_refit", 2)
    assert actor.llm is llm


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_cache_that_vllm_keeps_is_an_error_unless_it_is_wanted(kind: str) -> None:
    for keeps in (False, True):
        engine, _, llm = made(kind, keeps_kv_cache=keeps)
        llm.is_reset = False
        run(engine, "start_refit")
        if keeps:
            run(engine, "finish_refit", 1)
            assert run(engine, "version") == 1
        else:
            with pytest.raises(WorkerError, match="kept its prefix cache"):
                run(engine, "finish_refit", 1)
            assert run(engine, "version") == -1


def test_a_worker_without_an_engine_is_named() -> None:
    with pytest.raises(SeamError, match=r"SimpleNamespace\.llm"):
        SyncEngine(SimpleNamespace(llm=None, cfg={}), rank=0, node="", drafts=False, keeps_kv_cache=False)
