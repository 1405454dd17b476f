"""The vLLM weight-transfer engine `refit_transport`: one vLLM rank's part in a refit, driven by vLLM's own calls.

Select it with `WeightTransferConfig(backend="refit_transport")`; `init_weight_transfer_engine` joins the refit,
`start_weight_update` opens it, `update_weights` receives and makes every rank's kernels ready for the new weights, and
`finish_weight_update` closes it. Nothing fences the engine in between: pause generation, or use
`cluster.generation.GenerationWorker`.

Where the job commits staged, `stage` (through `collective_rpc`; vLLM has no call for it) begins to receive beside the
weights and returns at once, so that the engine goes on serving; the three calls then only take over what has arrived.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from refit_transport.errors import DeadlineError, TransferError
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting
from refit_transport.session import RefitSession
from refit_transport.targets.base import Target
from refit_transport.targets.joined import JoinedTarget
from refit_transport.targets.vllm import VllmTarget
from refit_transport.verification import Comparison

# A transfer ends by its own deadline, with a better message: give it time to.
_MARGIN_S = 10.0


@dataclass
class RefitInitInfo(WeightTransferInitInfo):
    """Where the refit's rank 0 listens, and who this engine is.

    first_rank: the refit rank of this engine's first vLLM rank. world_size: of the refit, both sides. secret: of the
    session, from whoever opened it. timeout_s: seconds until a silent peer is an error. incarnation: of this engine,
    where whoever opened the session counts them. node: this rank's node in the cluster, if anybody knows it; it tells
    which ranks are near where host names don't.
    """

    host: str
    port: int
    first_rank: int
    world_size: int
    secret: str = field(repr=False)
    timeout_s: float = 300.0
    incarnation: int = 0
    node: str = ""


@dataclass
class RefitUpdateInfo(WeightTransferUpdateInfo):
    """The weight version to receive; strictly above the last one."""

    version: int


class Staging:
    """A version that is received in a thread of its own."""

    def __init__(self, session: RefitSession, version: int) -> None:
        self.version = version
        self._patience_s = session.plan.job.settings.timeout_s + _MARGIN_S
        self._done: Future[None] = Future()

        def receive() -> None:
            try:
                session.transfer(version)
            except BaseException as error:  # noqa: BLE001  # handed to whoever joins
                self._done.set_exception(error)
            else:
                self._done.set_result(None)

        threading.Thread(target=receive, name="refit-staging", daemon=True).start()

    def join(self, version: int, *, rank: int) -> None:
        """Returns when it has arrived.

        Raises:
            TransferError: another version is being received.
            DeadlineError: it isn't there in time.
            RefitTransportError: whatever the transfer raised.
        """
        if version != self.version:
            reason = f"version {self.version} is being received, not {version}"
            raise TransferError(rank, -1, "update_weights", "", reason)
        try:
            self._done.result(self._patience_s)
        except FutureTimeoutError as error:
            if self._done.done():
                raise
            raise DeadlineError(f"rank {rank}", "its own staging", "update_weights", self._patience_s) from error


class RefitTransportEngine(WeightTransferEngine[RefitInitInfo, RefitUpdateInfo]):
    """See the module's docstring. vLLM constructs it in each worker after the model is loaded."""

    init_info_cls = RefitInitInfo
    update_info_cls = RefitUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._target: Target = VllmTarget(self.model, self.vllm_config)
        self._drafter: nn.Module | None = None
        self._session: RefitSession | None = None
        self._staging: Staging | None = None
        self._version = -1

    def draft_with(self, drafter: nn.Module | None) -> None:
        """Has refits deliver to a drafter of the model's own checkpoint (multi-token prediction) too.

        The plugin calls it before every `init_transfer_engine`. Other drafters aren't the policy's: they are kept.
        """
        if drafter is None or drafter is self._drafter:
            return
        config = self.vllm_config.speculative_config.draft_model_config
        if config.model == self.vllm_config.model_config.model:
            own = VllmTarget(drafter, self.vllm_config, model_config=config, beside=self.model)
            self._target, self._drafter = JoinedTarget(self._target, own), drafter

    def init_transfer_engine(self, init_info: RefitInitInfo) -> None:
        """Joins the refit and plans it; collective over all its ranks. A second call leaves the earlier refit."""
        self.shutdown()
        parallel = self.parallel_config
        channel = ControlChannel.join(
            Meeting(init_info.host, init_info.port, init_info.secret),
            rank=init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
            incarnation=init_info.incarnation,
        )
        self._session = RefitSession.prepare(channel, target=self._target, version=self._version, node=init_info.node)

    def stage(self, version: int) -> None:
        """Begins to receive a version in a thread, while the engine serves; its errors are those of `update_weights`.

        Raises:
            TransferError: the job commits in place, or a version is being received already.
        """
        session = self._joined("stage")
        rank = self.parallel_config.rank
        if session.plan.job.settings.commit != "staged":
            raise TransferError(
                rank, -1, "stage", "", "the job's refits are in place; set refit_cfg's commit to staged"
            )
        if self._staging is not None:
            raise TransferError(rank, -1, "stage", "", "a version is being received already")
        session.begin()
        self._staging = Staging(session, version)

    def start_weight_update(self) -> None:
        """Opens a refit: the weights are not to be used until it is finished."""
        session = self._joined("start_weight_update")
        if self._staging is None:
            session.begin()

    def receive_weights(self, update_info: RefitUpdateInfo) -> None:
        """Receives, verifies if the job asks for it, and runs post-load processing where a layer needs it."""
        session, staging = self._joined("update_weights"), self._staging
        if staging is None:
            session.transfer(update_info.version)
        else:
            self._staging = None
            staging.join(update_info.version, rank=self.parallel_config.rank)

    def finish_weight_update(self) -> None:
        """Closes the refit; a staged one takes over now, on all targets or on none."""
        session = self._joined("finish_weight_update")
        session.finish()
        self._version = session.version

    def compare(self) -> Comparison:
        """Compares what both sides hold now, between refits; collective over the whole refit.

        vLLM has no call for it: reach it through `collective_rpc`, as `cluster.generation.GenerationWorker` does.
        """
        return self._joined("compare").compare()

    @staticmethod
    def trainer_send_weights(*_arguments: object) -> None:
        """The trainer's side as vLLM had it before 0.30: a stream of whole tensors.

        Raises:
            TransferError: always.
        """
        reason = "weights are sent by a session (RefitTrainerEngine, or NeMo RL's adapter), never as whole tensors"
        raise TransferError(-1, -1, "trainer_send_weights", "", reason)

    def shutdown(self) -> None:
        """Leaves the refit; what is being received is given up."""
        self._staging = None
        if self._session is not None:
            self._session.close()
            self._session = None

    def _joined(self, call: str) -> RefitSession:
        if self._session is None:
            reason = f"{call} needs init_weight_transfer_engine first"
            raise TransferError(self.parallel_config.rank, -1, call, "", reason)
        return self._session
