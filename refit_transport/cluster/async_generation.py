"""A vLLM engine that generates while the policy trains, and takes refits in the middle of sequences.

One actor holds a whole engine: vLLM's `AsyncLLM` starts the processes of the engine's ranks itself. What was submitted
is generated in the background. A refit freezes it (`pause_generation` in keep mode), and it goes on with the new
weights where it was; each token is stamped with the version that chose it.

What a frozen sequence has cached of its own tokens came from the old weights. `KvCache` says what becomes of it:

- "recompute": it is dropped and computed anew, so each log-probability is the one that its version's weights give after
  all tokens before, as a trainer computes it.
- "keep": the sequence goes on from it at no cost. Log-probabilities of its later tokens are those that were sampled
  from, but no single version's weights give them. Prompts that have not got a token yet start anew, and new ones never
  share what older versions cached.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import os
import pickle
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from refit_transport.cluster.generation import (
    EngineConfig,
    RefitAddress,
    compare_served,
    engine_environment,
    engine_options,
    live_parameters,
    stage_weights,
)
from refit_transport.cluster.overlap import Activity, Interval
from refit_transport.cluster.sampling import SampleRequest, require_known, sample_of, vllm_parameters, vllm_prompt
from refit_transport.errors import WorkerError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.rl.trajectories import Sample

if TYPE_CHECKING:
    import torch
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from refit_transport.verification import Comparison

KvCache = Literal["recompute", "keep"]
# Read by the plugin.
ENDS_WITH = "REFIT_TRANSPORT_VLLM_ENDS_WITH"

_T = TypeVar("_T")
# Calls end before those who wait for them in the driver give up, so that the cause is told.
_MARGIN_S = 15.0
_STOPPING_S = 20.0
_LOOK_EVERY_S = 1.0
# Before what is generated; the lowest number comes first.
_FIRST = -1
# vLLM then tells of a response's first token and of its end.
_FIRST_AND_LAST = 1 << 30


class WorkerCalls:
    """What vLLM's processes answer besides vLLM's own calls; mixed into its worker class.

    Results are pickled, because vLLM's messages carry plain values only.
    """

    def refit_stage(self, version: int) -> None:
        stage_weights(self, version)

    def refit_compare(self) -> bytes:
        return pickle.dumps(compare_served(self))

    def refit_parameters(self) -> bytes:
        return pickle.dumps(live_parameters(self))


@dataclass(slots=True, eq=False)
class _Response:
    """A response in the making. `attempt` counts how often it was started anew."""

    ticket: int
    request: SampleRequest
    attempt: int = 0
    started: bool = False
    task: asyncio.Task[Sample] | None = None

    @property
    def name(self) -> str:
        """What vLLM knows it by."""
        return f"{self.ticket}.{self.attempt}"


class AsyncGenerationWorker:
    """A whole engine, whichever its tensor parallel size. Its methods are for one caller at a time.

    From `start_refit` to `finish_refit` the engine is fenced: what it generates stands still, and it refuses requests.
    It stays so when a refit fails, until a complete one; then what stood still goes on. While it receives what `stage`
    began, it generates.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        node: str = "",
        kv_cache: KvCache = "recompute",
        timeout_s: float = 300.0,
    ) -> None:
        """Starts the engine's processes. `timeout_s` is for each call that isn't a part of a refit."""
        os.environ.update(engine_environment(config) | {ENDS_WITH: str(os.getpid())})
        self._node, self._kv_cache, self._timeout_s, self._refit_timeout_s = node, kv_cache, timeout_s, timeout_s
        self._fenced = ""
        self._version = -1
        self._next_ticket = 0
        self._responses: dict[int, _Response] = {}
        self._unfinished = 0
        self._activity = Activity()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._thread.start()
        try:
            self._llm: AsyncLLM = self._run(_engine(config), "start", timeout_s)
        except BaseException:
            self._stop_loop()
            raise
        self._vocabulary = self._llm.model_config.get_vocab_size()

    def join_refit(self, address: RefitAddress) -> None:
        """Joins the refit as this engine's ranks; collective over the whole refit."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async def join() -> None:
            own = {**asdict(address), "node": self._node}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=own))

        self._refit_timeout_s = address.timeout_s + _MARGIN_S
        # Joining has three phases, each with its own deadline.
        self._run(join(), "join_refit", 3 * address.timeout_s + _MARGIN_S)

    def stage(self, version: int) -> None:
        """Begins to receive a version beside the weights that are served, and returns; for jobs that commit staged."""
        self._run(self._llm.collective_rpc("refit_stage", args=(version,)), "stage", self._refit_timeout_s)

    def start_refit(self) -> None:
        """Freezes what is generated, fences the engine and opens a refit."""

        async def start() -> None:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self._activity.end()
            await self._llm.start_weight_update()

        self._fenced = "a refit is open"
        self._run(start(), "start_refit", self._refit_timeout_s)

    def receive(self, version: int) -> None:
        """Receives a weight version, or waits for what `stage` began; collective over the whole refit."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"version": version})
        self._run(self._llm.update_weights(update), "receive", self._refit_timeout_s)

    def finish_refit(self, version: int) -> None:
        """Serves the version that arrived: what was frozen goes on with it, and nothing old is found in the cache."""
        self._run(self._finish_refit(version), "finish_refit", self._refit_timeout_s)

    async def _finish_refit(self, version: int) -> None:
        await self._llm.finish_weight_update(weight_version=str(version))
        self._version = version
        if self._kv_cache == "recompute":
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise WorkerError("generation", 0, "finish_refit", "vLLM kept its prefix cache of the old weights")
        else:
            await self._restart_unstarted()
        await self._llm.resume_generation()
        self._fenced = ""
        if self._unfinished:
            self._activity.begin()

    async def _restart_unstarted(self) -> None:
        """Gives prompts that may lie half computed, or would find what the old weights cached, the new cache key."""
        waiting = [r for r in self._responses.values() if r.task and not r.task.done() and not r.started]
        names = [response.name for response in waiting]
        for response in waiting:
            response.attempt += 1
        if names:
            await self._llm.abort(names)

    def compare(self) -> Comparison:
        """Compares what is served with what the sources hold now, between refits; collective over the whole refit."""
        found: list[bytes] = self._run(self._llm.collective_rpc("refit_compare"), "compare", self._refit_timeout_s)
        comparison: Comparison = pickle.loads(found[0])
        return comparison

    def version(self) -> int:
        """The version that is served; -1 before the first refit."""
        return self._version

    def submit(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Starts generating in the background; returns a ticket for each request.

        Raises:
            WorkerError: the engine is fenced, or a prompt has a token that the model lacks; nothing was started.
        """
        self._require_open("submit")
        require_known((request.prompt for request in requests), self._vocabulary, "submit")

        async def admit() -> list[int]:
            return [self._admit(request) for request in requests]

        return self._run(admit(), "submit", self._timeout_s)

    def _admit(self, request: SampleRequest) -> int:
        response = _Response(self._next_ticket, request)
        self._next_ticket += 1
        self._responses[response.ticket] = response
        self._unfinished += 1
        self._activity.begin()
        response.task = asyncio.ensure_future(self._generated(response))
        # Also for a task that is cancelled before it has begun.
        response.task.add_done_callback(self._count_finished)
        return response.ticket

    def _count_finished(self, _: asyncio.Task[Sample]) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._activity.end()

    async def _generated(self, response: _Response) -> Sample:
        while True:
            attempt = response.attempt
            completion = await self._completion(response)
            if attempt == response.attempt or completion.finish_reason != "abort":
                return sample_of(response.request, completion)

    async def _completion(self, response: _Response) -> CompletionOutput:
        """vLLM's answer; where it matters which responses have a token, put together from the first and the rest."""
        from vllm.sampling_params import RequestOutputKind

        prompt = vllm_prompt(response.request.prompt)
        if self._kv_cache == "keep":
            prompt["cache_salt"] = f"version {self._version}"
            kind: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA, "stream_interval": _FIRST_AND_LAST}
        else:
            kind = {"output_kind": RequestOutputKind.FINAL_ONLY}
        wanted = vllm_parameters(response.request, **kind)
        tokens: list[int] = []
        logprobs: list[Any] = []
        last: Any = None
        async for output in self._llm.generate(prompt, wanted, response.name):
            [last] = output.outputs
            tokens += last.token_ids
            logprobs += last.logprobs or []
            response.started = bool(tokens)
        if last is None:
            raise WorkerError("generation", 0, "sample", "vLLM ended a response without a word")
        last.token_ids, last.logprobs = tokens, logprobs
        completion: CompletionOutput = last
        return completion

    def finished(self) -> list[int]:
        """Tickets of what `take` gives at once."""
        return [ticket for ticket, response in self._responses.items() if response.task and response.task.done()]

    def take(self, tickets: Sequence[int], *, timeout_s: float) -> list[Sample]:
        """The responses of these tickets, in their order, once all are finished; each can be taken once.

        Raises:
            WorkerError: a ticket is unknown, a response failed, the engine is fenced before all are finished, or they
                aren't within `timeout_s`; nothing is taken then.
        """
        unknown = [ticket for ticket in tickets if ticket not in self._responses]
        if unknown:
            raise WorkerError("generation", 0, "take", f"no such tickets: {unknown}; taken already, or aborted")
        tasks = [task for ticket in tickets if (task := self._responses[ticket].task)]
        if not all(task.done() for task in tasks):
            self._require_open("take")
            self._run(_settled(tasks, timeout_s), "take", timeout_s + _MARGIN_S)
        samples = _results(tasks)
        for ticket in tickets:
            del self._responses[ticket]
        return samples

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Submits and waits.

        Raises:
            WorkerError: the engine is fenced, a response failed, or they take longer than `timeout_s`.
        """
        return self.take(self.submit(requests), timeout_s=self._timeout_s)

    def abort(self) -> int:
        """Drops everything that was submitted and not taken, finished or not; returns how many."""

        async def abort() -> int:
            dropped, self._responses = list(self._responses.values()), {}
            tasks = [response.task for response in dropped if response.task and not response.task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return len(dropped)

        return self._run(abort(), "abort", self._timeout_s)

    def activity(self) -> list[Interval]:
        """When anything was generated, since the last call."""

        async def taken() -> list[Interval]:
            return self._activity.take()

        return self._run(taken(), "activity", self._timeout_s)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given the ones before it, at temperature 1: one less than tokens per sequence.

        Raises:
            WorkerError: the engine is fenced, or a sequence has a token that the model lacks.
        """
        self._require_open("logprobs")
        require_known(sequences, self._vocabulary, "logprobs")
        return self._run(self._logprobs(sequences), "logprobs", self._timeout_s)

    async def _logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        async def of(sequence: Sequence[int]) -> list[float]:
            wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, skip_clone=True)
            self._next_ticket += 1
            name, found = f"{self._next_ticket}.logprobs", None
            prompt = vllm_prompt(sequence)
            async for output in self._llm.generate(prompt, wanted, name, priority=_FIRST):
                found = output.prompt_logprobs or found
            assert found is not None
            return [float(step[token].logprob) for token, step in zip(sequence[1:], found[1:], strict=True)]

        return list(await asyncio.gather(*(of(sequence) for sequence in sequences)))

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Copies of the live parameters of each of the engine's ranks, by name: what is served, for comparisons."""
        found: list[bytes] = self._run(self._llm.collective_rpc("refit_parameters"), "weights", self._timeout_s)
        return [pickle.loads(parameters) for parameters in found]

    def leave_refit(self) -> None:
        """Leaves the refit; the engine goes on with what it serves."""
        self._run(self._llm.shutdown_weight_transfer_engine(), "leave_refit", self._refit_timeout_s)

    def shutdown(self) -> None:
        """Drops what is generated and ends the engine's processes; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self._fenced = "it was shut down"
        try:
            self.abort()
        finally:
            self._llm.shutdown(timeout=_STOPPING_S)
            self._stop_loop()
            # Joins those of its processes that have ended.
            multiprocessing.active_children()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOPPING_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, _T], call: str, timeout_s: float) -> _T:
        """Runs it beside the generation and waits for its result.

        Raises:
            WorkerError: it failed, or gave no answer within `timeout_s`.
        """
        future, deadline = asyncio.run_coroutine_threadsafe(coroutine, self._loop), Deadline(timeout_s)
        try:
            while not concurrent.futures.wait([future], min(_LOOK_EVERY_S, deadline.remaining())).done:
                # Not every call of vLLM ends when its engine does.
                is_dead = call != "start" and self._llm.errored
                if deadline.passed or is_dead:
                    future.cancel()
                    late = f"no answer from the engine within {timeout_s:g} s; raise timeout_s if it is only slow"
                    raise WorkerError("generation", 0, call, "the engine's processes have ended" if is_dead else late)
            return future.result()
        except WorkerError:
            raise
        except Exception as error:
            raise _unforeseen(call, error) from error

    def _require_open(self, call: str) -> None:
        if self._fenced:
            reason = f"fenced: {self._fenced}; it serves again after a complete refit"
            raise WorkerError("generation", 0, call, reason)


async def _engine(config: EngineConfig) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **engine_options(config),
            distributed_executor_backend="uni" if config.tensor_parallel == 1 else "mp",
            scheduling_policy="priority",
            worker_extension_cls=f"{WorkerCalls.__module__}.{WorkerCalls.__qualname__}",
            disable_log_stats=True,
        ),
        # As many sequences and tokens at a time as an engine that is called in batches.
        usage_context=UsageContext.LLM_CLASS,
    )


async def _settled(tasks: Sequence[asyncio.Task[Sample]], timeout_s: float) -> None:
    """Waits until all are finished, or one has failed."""
    _, missing = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    if missing and not any(task.done() and task.exception() for task in tasks):
        reason = f"{len(missing)} of {len(tasks)} responses are not finished within {timeout_s:g} s"
        raise WorkerError("generation", 0, "take", f"{reason}; raise the timeout or lower max_tokens")


def _results(tasks: Sequence[asyncio.Task[Sample]]) -> list[Sample]:
    """Of tasks that are finished, or of which one has failed.

    Finished ones don't change any more, so the loop isn't asked, which may be busy admitting requests.

    Raises:
        WorkerError: one has failed.
    """
    for task in tasks:
        if not task.done() or (error := task.exception()) is None:
            continue
        if isinstance(error, WorkerError):
            raise error
        raise _unforeseen("take", error) from error
    return [task.result() for task in tasks]


def _unforeseen(call: str, error: BaseException) -> WorkerError:
    return WorkerError("generation", 0, call, f"{type(error).__name__}: {error}")
