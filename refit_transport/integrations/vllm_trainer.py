"""The training side of vLLM's weight transfer: a plain training script refits running engines through vLLM's own API.

    engine = WeightTransferTrainerFactory.trainer_init(
        RefitTrainerInitInfo(rank=dist.get_rank(), engine_ranks=1), client=ServerClient("http://localhost:8000"),
        source=RefitSource(source_of(model.state_dict)),
    )
    engine.send_weights()

Both calls are collective over all training ranks. Importing this module tells vLLM's factory about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError, TransferError
from refit_transport.fabrics.group_rendezvous import join_group
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.report import RefitReport
from refit_transport.session import RefitSession
from refit_transport.sources.base import Source

ENGINE = "refit_transport"
# The engine's own deadlines tell more than ours: give them time to. Joining has three phases of their own.
_MARGIN_S = 30.0


class RefitSource(WeightSource):
    """A `refit_transport` source (`source_of(module.state_dict)`, `MegatronSource`) as vLLM's trainer side takes it.

    Nothing is ever gathered: each rank sends parts of what it holds, so there is no stream of whole tensors.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def metadata(self) -> list[ParamMeta]:
        """The tensors of this rank's manifest."""
        found = self.source.manifest(0).tensors
        return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in found]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Not available.

        Raises:
            LayoutError: always.
        """
        raise LayoutError("", -1, "a backend that sends parts of tensors", "one that asks for whole tensors")


@dataclass(kw_only=True)
class RefitTrainerInitInfo(TrainerInitInfo):
    """How the training ranks take part; `rank` is this process's in torch.distributed's default group.

    engine_ranks: of all engines that `client` drives together. settings: the refit's, rank 0's count for all; coverage,
    verification, timeout and all else are there. host: the address of rank 0 that engines reach; None finds one toward
    the process group's store. port: 0 is any free one.
    """

    backend: ClassVar[str] = ENGINE

    engine_ranks: int
    settings: RefitSettings = field(default_factory=lambda: RefitSettings(coverage="all", verify="sample"))
    host: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where there is nobody to send to."""
        if self.engine_ranks < 1:
            raise ValueError(f"engine_ranks must be at least 1: the engines' ranks in all (got {self.engine_ranks})")


class RefitTrainerEngine(TrainerWeightTransferEngine[RefitTrainerInitInfo]):
    """One training rank's side. Rank 0 drives the engines through `client`; bytes never pass through it."""

    init_info_cls = RefitTrainerInitInfo

    def __init__(
        self,
        session: RefitSession,
        calls: _EngineCalls,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        rank: int,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=rank == 0)
        self._session, self._calls = session, calls

    @classmethod
    def trainer_init(
        cls, init_info: RefitTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Joins the engines, plans and connects. Collective over the training ranks; rank 0 calls the engines.

        Raises:
            TransferError: there is no process group or not a source of ours, or an engine refused; names the cause.
            LayoutError, AgreementError, DeadlineError: as `RefitSession.prepare`.
        """
        rank, settings = init_info.rank, init_info.settings
        if not isinstance(source, RefitSource):
            reason = f"the source must be a RefitSource, which describes its parts (got {type(source).__name__})"
            raise TransferError(rank, -1, "trainer_init", "", reason)
        if not dist.is_initialized() or dist.get_rank() != rank:
            reason = "rank must be this process's in torch.distributed's default group: call init_process_group first"
            raise TransferError(rank, -1, "trainer_init", "", reason)
        channel = join_group(
            dist.distributed_c10d._get_default_group(),
            timeout_s=settings.timeout_s,
            others=init_info.engine_ranks,
            host=init_info.host,
            port=init_info.port,
        ).channel
        calls = _EngineCalls(channel, 3 * settings.timeout_s + _MARGIN_S)
        first = dist.get_world_size()
        info = {
            "host": channel.meeting.host,
            "port": channel.meeting.port,
            "secret": channel.meeting.secret,
            "first_rank": first,
            "world_size": first + init_info.engine_ranks,
            "timeout_s": settings.timeout_s,
        }
        answer = calls.start(client.init_weight_transfer_engine, info) if rank == 0 else None
        try:
            session = RefitSession.prepare(channel, settings=settings if rank == 0 else None, source=source.source)
            calls.wait(answer)
        except BaseException:
            calls.close()
            raise
        return cls(session, calls, client=client, source=source, rank=rank)

    @property
    def version(self) -> int:
        """The last weight version that the engines serve; -1 before the first."""
        return self._session.version

    def send_weights(self) -> RefitReport | None:
        """Has every engine serve the present weights, as the next version. Rank 0 returns the report.

        Engines must not generate meanwhile: `ServerClient` pauses servers itself; with other clients the caller does.
        Where it fails, what the engines hold may be torn: keep them paused until a new trainer engine's `send_weights`
        has succeeded.

        Raises:
            RefitTransportError: the refit failed, or an engine refused; the same cause on every rank. Where everything
                has arrived and an engine fails to close, on rank 0 alone.
        """
        session, version = self._session, self._session.version + 1
        answer: Future[None] | None = None
        if self.is_sender:
            self._calls.wait(self._calls.start(self.client.start_weight_update))
            answer = self._calls.start(self.client.update_weights, {"version": version})
        session.begin()
        session.transfer(version)
        self._calls.wait(answer)
        closing = self._calls.start(self.client.finish_weight_update, str(version)) if self.is_sender else None
        report = session.finish()
        self._calls.wait(closing)
        return report

    def shutdown(self) -> None:
        """Leaves the refit; engines go on with what they serve."""
        self._session.close()
        self._calls.close()


class _EngineCalls:
    """Rank 0's calls to the engines, beside its own part in the refit; a failing one ends the refit for all ranks."""

    def __init__(self, channel: ControlChannel, patience_s: float) -> None:
        self._channel, self._patience_s = channel, patience_s
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit-engine-calls")

    def start(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Calls an engine in a thread."""

        def run() -> None:
            try:
                call(*arguments)
            except Exception as error:
                refused = TransferError(0, -1, call.__name__, "", f"an engine failed: {error}")
                # Where an engine has told all ranks before, its cause stays the first: it says more than this.
                with suppress(TransferError):
                    self._channel.report_failure(refused)
                raise refused from error

        return self._threads.submit(run)

    def wait(self, answer: Future[None] | None) -> None:
        """Returns when the engine has answered; at once on ranks that didn't call."""
        if answer is None:
            return
        try:
            answer.result(self._patience_s)
        except FutureTimeoutError as error:
            if answer.done():
                raise
            reason = f"no answer from an engine within {self._patience_s:g} s"
            raise TransferError(0, -1, "engine call", "", reason) from error

    def close(self) -> None:
        """Lets go of the thread; a call that is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def register_trainer() -> None:
    """Tells vLLM's trainer factory of this engine; a second call does nothing."""
    if ENGINE not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(ENGINE, RefitTrainerEngine)


register_trainer()
