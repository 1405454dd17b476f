"""In a NeMo RL generation worker's process: its vLLM engine as refit targets, fenced from `start_refit` to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

from refit_transport.cluster.generation import RefitAddress
from refit_transport.errors import SeamError, WorkerError
from refit_transport.integrations.nemo_rl import engine_rank
from refit_transport.integrations.nemo_rl.seams import ENGINE_ATTRIBUTES, required
from refit_transport.verification import Comparison

_GENERATING = frozenset({"generate", "chat", "encode", "beam_search"})


class Fenced:
    """vLLM's engine but for generating, which raises `reason`: what it serves is no whole version."""

    def __init__(self, engine: Any, reason: str) -> None:
        self.engine, self.reason = engine, reason

    def __getattr__(self, name: str) -> Any:
        if name in _GENERATING:
            raise WorkerError("generation", -1, name, f"fenced: {self.reason}; it serves again after a complete refit")
        return getattr(self.engine, name)


class _Engine:
    """What both engines have. `keeps_kv_cache`: requests in flight go on with what the weights before have cached."""

    def __init__(self, actor: Any, *, rank: int, node: str, drafts: bool, keeps_kv_cache: bool) -> None:
        required(actor, ENGINE_ATTRIBUTES)
        self.rank, self.node = rank, node
        self._actor, self._drafts, self._keeps_kv_cache = actor, drafts, keeps_kv_cache
        self._version = -1
        # From the start of a refit to its end: what is served in between is no whole version.
        self._is_open = False

    @property
    def _llm(self) -> Any:
        llm = self._actor.llm
        return llm.engine if isinstance(llm, Fenced) else llm

    def _close(self, reason: str) -> None:
        if self._is_open:
            self._actor.llm = Fenced(self._llm, reason)

    def _serve(self, version: int) -> None:
        self._actor.llm, self._version, self._is_open = self._llm, version, False

    def _require_reset(self, is_reset: object) -> None:
        if is_reset is False and not self._keeps_kv_cache:
            reason = "vLLM kept its prefix cache of the old weights"
            raise WorkerError("generation", self.rank, "finish_refit", reason)


class SyncEngine(_Engine):
    """The `LLM` of a `VllmGenerationWorker`."""

    def join_refit(self, address: RefitAddress) -> None:
        """Joins the refit as this engine's ranks; collective over the whole refit."""
        self._ask(engine_rank.join, asdict(address), self.node, self._drafts)

    def stage(self, version: int) -> None:
        """Begins to receive a version beside the weights that are served; for jobs that commit staged."""
        self._ask(engine_rank.stage, version)

    def start_refit(self) -> None:
        """Fences the engine."""
        self._is_open = True
        self._close("a refit is open")

    def receive(self, version: int) -> None:
        """Receives a weight version, or waits for what `stage` began; collective over the whole refit."""
        self._ask(engine_rank.receive, version)

    def finish_refit(self, version: int) -> None:
        """Serves the version that arrived: drops what was cached under the old one and lifts the fence."""
        self._ask(engine_rank.finish)
        self._require_reset(self._llm.llm_engine.reset_prefix_cache())
        self._llm.llm_engine.reset_encoder_cache()
        self._serve(version)

    def fence(self, reason: str) -> None:
        """Has the engine say why it doesn't generate, if a refit that failed had begun to change what it serves."""
        self._close(reason)

    def version(self) -> int:
        """The version that is served; -1 before the first refit."""
        return self._version

    def compare(self) -> Comparison:
        """Compares what is served with what the sources hold now, between refits; collective over the whole refit."""
        found: Comparison = self._ask(engine_rank.compare)[0]
        return found

    def leave_refit(self) -> None:
        """Leaves the refit; the engine goes on with what it serves."""
        self._ask(engine_rank.leave)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs a function on each of the engine's ranks."""
        found: list[Any] = self._llm.collective_rpc(function, args=arguments)
        return found


class AsyncEngine(_Engine):
    """The `AsyncLLM` of a `VllmAsyncGenerationWorker`: what it generates stands still during a refit, and goes on."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the engine lives in."""
        handler = getattr(self._llm, "output_handler", None)
        if handler is None:
            version = str(getattr(import_module("vllm"), "__version__", "of unknown version"))
            raise SeamError("vllm", version, "AsyncLLM.output_handler", "a task of the loop that made the engine")
        found: asyncio.AbstractEventLoop = handler.get_loop()
        return found

    async def join_refit(self, address: RefitAddress) -> None:
        """See `SyncEngine`."""
        await self._ask(engine_rank.join, asdict(address), self.node, self._drafts)

    async def stage(self, version: int) -> None:
        """See `SyncEngine`."""
        await self._ask(engine_rank.stage, version)

    async def start_refit(self) -> None:
        """Freezes what is generated; new requests wait."""
        self._is_open = True
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def receive(self, version: int) -> None:
        """See `SyncEngine`."""
        await self._ask(engine_rank.receive, version)

    async def finish_refit(self, version: int) -> None:
        """Serves the version that arrived; what was frozen goes on with it."""
        await self._ask(engine_rank.finish)
        self._require_reset(await self._llm.reset_prefix_cache(reset_running_requests=not self._keeps_kv_cache))
        await self._llm.reset_encoder_cache()
        self._serve(version)
        await self._llm.resume_generation()

    async def fence(self, reason: str) -> None:
        """See `SyncEngine`; what is frozen stays so until a complete refit."""
        self._close(reason)

    async def version(self) -> int:
        """See `SyncEngine`."""
        return self._version

    async def compare(self) -> Comparison:
        """See `SyncEngine`."""
        found: Comparison = (await self._ask(engine_rank.compare))[0]
        return found

    async def leave_refit(self) -> None:
        """See `SyncEngine`."""
        await self._ask(engine_rank.leave)

    async def _ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        found: list[Any] = await self._llm.collective_rpc(function, args=arguments)
        return found
