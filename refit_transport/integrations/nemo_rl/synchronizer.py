"""NeMo RL's `WeightSynchronizer`, on a `RefitSynchronizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import ray

from refit_transport.cluster.network import PortRange
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.workers import collect
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import ConfigError, RefitTransportError
from refit_transport.integrations.nemo_rl.engine import AsyncEngine, SyncEngine
from refit_transport.integrations.nemo_rl.groups import AdoptedGroup, workers_in
from refit_transport.integrations.nemo_rl.policy_rank import PolicyRank
from refit_transport.integrations.nemo_rl.remote import Relay
from refit_transport.integrations.nemo_rl.settings import KEEPS_KV_CACHE, read_settings
from refit_transport.report import RefitReport

_TIMED = "prepare_for_generation/transfer_and_update_weights"


class RefitTransportSynchronizer:
    """Keeps NeMo RL's vLLM engines at the policy's weights. Registered as a `WeightSynchronizer` by `install`.

    Order: `init_communicator` once, `sync_weights` for every version, `shutdown`. Refit ranks: the policy's workers in
    their order, then the engines', one after the other. The n-th complete sync delivers version n.
    """

    def __init__(self, policy: Any, generation: Any) -> None:
        """
        Args:
            policy: NeMo RL's `Policy`, with Megatron or DTensor workers.
            generation: NeMo RL's `VllmGeneration`.
        """
        self._policy, self._generation = policy, generation
        self._ranks_per_engine = int(generation.tp_size) * int(generation.pp_size)
        self._groups: tuple[AdoptedGroup, ...] = ()
        self._members: tuple[Any, ...] = ()
        self._known: dict[tuple[Any, ...], AdoptedGroup] = {}
        self._settings: RefitSettings | None = None
        self._synchronizer: RefitSynchronizer | None = None
        self._relay: Any = None
        self._version = 0
        self._stale = True

    @property
    def is_stale(self) -> bool:
        """Whether no sync has been complete, or the last one failed."""
        return self._stale

    @property
    def version(self) -> int:
        """The last version that every engine serves; 0 before the first."""
        return self._version

    def init_communicator(self) -> None:
        """Joins all ranks and plans the refit.

        Raises:
            RuntimeError: naming group, rank and phase of the first failure.
            ConfigError: `refit_cfg.nccl_reshard` is wrong.
        """
        try:
            self._adopt()
            self._driven().prepare()
        except ConfigError:
            raise
        except RefitTransportError as error:
            raise self._settled(error, "a refit could not be planned") from error

    def reconcile_communicator(self) -> None:
        """Takes up workers that NeMo RL has started anew; the next sync joins and plans again. Nothing if none was.

        Raises:
            WorkerError: a new worker can't take part.
        """
        if self._generation is not None and self._handles() != self._members:
            self._adopt()
            self._stale = True

    def sync_weights(self, *, timer: Any = None, kv_scales: Mapping[str, float] | None = None) -> dict[str, float]:
        """Makes every engine serve the policy's present weights; returns the refit's figures.

        Raises:
            RuntimeError: naming group, rank and phase. All ranks have ended their part by then. Engines whose
                weights may be torn refuse to generate until a sync is complete; the next one joins and plans anew.
            NotImplementedError: `kv_scales` are given.
        """
        if kv_scales is not None:
            raise NotImplementedError("kv_scales: scales of an FP8 KV cache can't be delivered by nccl_reshard yet")
        synchronizer = self._driven()
        self._stale = True
        with timer.time(_TIMED) if timer is not None else nullcontext():
            try:
                report = synchronizer.sync(self._version + 1)
            except RefitTransportError as error:
                raise self._settled(error, f"weight version {self._version + 1} was not delivered") from error
        self._version, self._stale = report.version, False
        return _figures(report)

    def shutdown(self) -> None:
        """Leaves the refit. Idempotent."""
        for group in self._groups:
            group.release()
        if self._relay is not None:
            ray.kill(self._relay)
        self._groups, self._members, self._known, self._relay, self._synchronizer = (), (), {}, None, None
        # NeMo RL's generation holds this object: without the way back both can go.
        self._generation = None

    def _driven(self) -> RefitSynchronizer:
        if self._synchronizer is None:
            raise RuntimeError("init_communicator must be called before weights are synchronized, and shutdown after")
        return self._synchronizer

    def _handles(self) -> tuple[Any, ...]:
        """The actors of the refit: the policy's, then one for each engine."""
        group = self._generation.worker_group
        leaders = [group.workers[group.get_dp_leader_worker_idx(shard)] for shard in range(group.dp_size)]
        return (*self._policy.worker_group.workers, *leaders)

    def _adopt(self) -> None:
        """Makes groups of the actors that there are now; those that were there before keep theirs."""
        handles, trains = self._handles(), len(self._policy.worker_group.workers)
        engines = handles[trains:]
        self._settings = read_settings(
            self._generation.cfg, training_ranks=trains, generation_ranks=len(engines) * self._ranks_per_engine
        )
        known = dict(self._known)
        policy = known.get(handles[:trains]) or self._group("policy", handles[:trains], PolicyRank)
        engine_class = AsyncEngine if self._is_async else SyncEngine
        groups = [
            known.get((handle,)) or self._group(f"engine-{index}", (handle,), engine_class)
            for index, handle in enumerate(engines)
        ]
        self._known = {handles[:trains]: policy, **{(handle,): g for handle, g in zip(engines, groups, strict=True)}}
        self._groups, self._members = (policy, *groups), handles
        if self._synchronizer is None:
            self._synchronizer = RefitSynchronizer(
                policy,
                groups,
                settings=self._settings,
                ports=PortRange(),
                ranks_per_actor=self._ranks_per_engine,
            )
        else:
            self._synchronizer.reconcile(policy, groups)

    @property
    def _is_async(self) -> bool:
        return bool(self._generation.cfg["vllm_cfg"].get("async_engine"))

    def _group(self, name: str, handles: Sequence[Any], worker_class: type) -> AdoptedGroup:
        config = self._generation.cfg
        own: dict[str, Any] = {}
        relay = None
        if worker_class is not PolicyRank:
            own["drafts"] = bool(config.get("_mtp_weights_from_refit"))
            own["keeps_kv_cache"] = bool(config.get(KEEPS_KV_CACHE))
            if self._is_async:
                relay = self._relay = self._relay or ray.remote(Relay).options(num_cpus=0).remote()
        assert self._settings is not None
        group = AdoptedGroup(name, handles, timeout_s=self._settings.timeout_s, relay=relay)
        collect([workers_in(group, worker_class, own)], timeout_s=self._settings.timeout_s)
        return group

    def _settled(self, error: RefitTransportError, what: str) -> RuntimeError:
        """The error for NeMo RL, when every rank has ended its part and every engine that answers is fenced."""
        timeout_s = 0.0 if self._settings is None else self._settings.timeout_s
        for group in self._groups:
            group.settle(timeout_s)
        fencing = [group.start("fence", f"{what}: {error}") for group in self._groups[1:]]
        references = [reference for pending in fencing for reference in pending.references.values()]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)
        return RuntimeError(f"{what}: {error}")


def _figures(report: RefitReport) -> dict[str, float]:
    """Scalars for NeMo RL's logger: seconds and bytes of the whole refit."""
    return {
        "refit/version": float(report.version),
        "refit/seconds": report.total_seconds,
        "refit/network_bytes": float(report.summary.network_bytes),
        "refit/old_way_received_bytes": float(report.summary.old_way_received_bytes),
    }
