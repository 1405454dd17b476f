"""In a NeMo RL policy worker's process: the worker's model as a refit source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from refit_transport.cluster.sending import SendingRank
from refit_transport.compatibility import IN_NEMO_RL, require
from refit_transport.errors import LayoutError
from refit_transport.integrations.nemo_rl.seams import POLICY_ATTRIBUTES, required
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.base import Source


class PolicyRank(SendingRank):
    """The refit's side of one `MegatronPolicyWorker` or `DTensorPolicyWorker`."""

    def __init__(self, actor: Any, *, rank: int, node: str) -> None:
        required(actor, POLICY_ATTRIBUTES)
        self.rank, self.node = rank, node
        self._actor = actor
        self._source: Source | None = None

    def source(self) -> Source:
        """The policy's weights as they are; NeMo RL may put another model in the worker between refits."""
        if self._source is None:
            make = _megatron_source if _enabled(self._actor, "megatron_cfg") else _dtensor_source
            self._source = make(self._actor)
        return self._source

    def send(self, version: int) -> None:
        """See `SendingRank`."""
        with _gathered(self._actor):
            super().send(version)


def _enabled(actor: Any, section: str) -> bool:
    return bool((actor.cfg.get(section) or {}).get("enabled"))


def _logical_model(actor: Any) -> LogicalModel:
    name = str(actor.cfg["model_name"])
    return LogicalModel.from_config(_checkpoint_config(name), source=f"{name}/config.json")


def _checkpoint_config(name: str) -> Mapping[str, Any]:
    """The `config.json` of a folder, or of a hub's model in the local cache."""
    folder = Path(name)
    if folder.is_dir():
        path = folder / "config.json"
    else:
        from transformers.utils import cached_file

        path = Path(str(cached_file(name, "config.json")))
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _megatron_source(actor: Any) -> Source:
    require("megatron-core", needed_for="NeMo RL's Megatron policy", table=IN_NEMO_RL)
    from refit_transport.sources.megatron import MegatronSource

    chunks = actor.model if isinstance(actor.model, list | tuple) else [actor.model]
    return MegatronSource(chunks, _logical_model(actor))


def _dtensor_source(actor: Any) -> Source:
    from refit_transport.sources.dtensor import source_of

    if getattr(actor.model, "state_dict_adapter", None) is not None:
        got = f"{type(actor.model).__name__}, which has names and stackings of its own"
        raise LayoutError("", -1, "a policy whose module is that of transformers", got)

    def state() -> dict[str, torch.Tensor]:
        return {name: value for name, value in actor.model.state_dict().items() if not name.endswith("_extra_state")}

    return source_of(state, model=_logical_model(actor))


@contextmanager
def _gathered(actor: Any) -> Iterator[None]:
    """Megatron may leave the gathering of new parameters to the next forward pass; a refit reads them before."""
    is_deferred = getattr(actor, "_forward_pre_hook_enabled", lambda: False)()
    if is_deferred:
        actor.disable_forward_pre_hook()
    try:
        yield
    finally:
        if is_deferred:
            actor.enable_forward_pre_hook()
