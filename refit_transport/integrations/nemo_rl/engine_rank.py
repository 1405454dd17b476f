"""In each of vLLM's own processes: functions that `collective_rpc` runs on a vLLM worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_transport.compatibility import IN_NEMO_RL, require
from refit_transport.verification import Comparison

_ENGINE = "_refit_transport_engine"


def join(worker: Any, address: Mapping[str, Any], node: str, drafts: bool) -> None:  # noqa: FBT001 - positional by RPC
    """Joins the refit at `address` (a `RefitAddress`). `node`: the engine's, for ranks that don't know their own.

    Raises:
        UnsupportedVersionError: vLLM's version isn't supported.
        LayoutError, AgreementError, DeadlineError: as `RefitSession.prepare`.
    """
    require("vllm", needed_for="NeMo RL's generation workers", table=IN_NEMO_RL)
    from refit_transport.integrations.vllm_engine import RefitInitInfo

    engine = getattr(worker, _ENGINE, None)
    if engine is None:
        engine = _made(worker)
        setattr(worker, _ENGINE, engine)
    if drafts:
        engine.draft_with(_drafter(worker))
    parallel = worker.vllm_config.parallel_config
    # NeMo RL's engines have a place of their own each, also those that vLLM counts as one another's replicas.
    first = address["first_rank"] - parallel.data_parallel_index * parallel.world_size
    engine.init_transfer_engine(RefitInitInfo(**{**address, "first_rank": first}, node=_own_node() or node))


def stage(worker: Any, version: int) -> None:
    """Begins to receive a version beside the weights that are served."""
    _joined(worker).stage(version)


def receive(worker: Any, version: int) -> None:
    """Receives a weight version, or waits for what `stage` began, and makes the kernels ready for it."""
    from refit_transport.integrations.vllm_engine import RefitUpdateInfo

    engine = _joined(worker)
    engine.start_weight_update()
    engine.receive_weights(RefitUpdateInfo(version))


def finish(worker: Any) -> None:
    """Closes the refit."""
    _joined(worker).finish_weight_update()


def compare(worker: Any) -> Comparison:
    """Compares what is served with what the sources hold."""
    found: Comparison = _joined(worker).compare()
    return found


def leave(worker: Any) -> None:
    """Leaves the refit, if in one."""
    engine = getattr(worker, _ENGINE, None)
    if engine is not None:
        engine.shutdown()


def _made(worker: Any) -> Any:
    from vllm.config import WeightTransferConfig

    from refit_transport.integrations.vllm_engine import RefitTransportEngine

    config = WeightTransferConfig(backend="refit_transport")
    return RefitTransportEngine(config, worker.vllm_config, worker.device, worker.model_runner.get_model())


def _drafter(worker: Any) -> Any:
    """The model that drafts, or None; vLLM 0.25 shows it through the runner's proposer only."""
    if hasattr(worker, "get_draft_model"):
        return worker.get_draft_model()
    model: Any = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    return model.unwrap() if hasattr(model, "unwrap") else model


def _joined(worker: Any) -> Any:
    return getattr(worker, _ENGINE)


def _own_node() -> str:
    """The node of this process where it is Ray's; "" where vLLM started it."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
