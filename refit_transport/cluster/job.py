"""A whole job on Ray: a Megatron policy, vLLM engines, and the synchronizer between them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from refit_transport.cluster.async_generation import AsyncGenerationWorker, KvCache
from refit_transport.cluster.checkpoint import CheckpointReader
from refit_transport.cluster.generation import EngineConfig, GenerationWorker
from refit_transport.cluster.network import LOOPBACK, PortRange
from refit_transport.cluster.policy import PolicyWorker
from refit_transport.cluster.scratch import scratch_folder
from refit_transport.cluster.synchronizer import RefitSynchronizer
from refit_transport.cluster.tiny_model import tiny_model
from refit_transport.cluster.workers import Pending, WorkerGroup, collect
from refit_transport.config.schema import RefitConfig
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import WorkerError
from refit_transport.events import Observer, observing

# Called with what comes next, in a few words.
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RefitJob:
    """The running parts of a job. `engines` has one group per vLLM engine."""

    policy: WorkerGroup
    engines: tuple[WorkerGroup, ...]
    synchronizer: RefitSynchronizer

    def release(self) -> None:
        """Ends every worker."""
        for group in (self.policy, *self.engines):
            group.release()


@contextlib.contextmanager
def ray_cluster(*, address: str | None, cpus: int | None = None) -> Iterator[Path | None]:
    """Joins the Ray cluster at `address`, or starts one on this machine that ends with the block.

    A Ray that this process already joined is used as it is and left running. Yields the folder for temporary files of
    a cluster that was started here, which is removed with it; None for another cluster.

    Raises:
        WorkerError: nobody answers at `address`, or Ray doesn't start.
    """
    if ray.is_initialized():
        yield None
    elif address:
        with _ray(address):
            yield None
    else:
        with (
            scratch_folder() as folder,
            _ray("local", include_dashboard=False, num_cpus=cpus, _temp_dir=str(folder)),
        ):
            yield folder


@contextlib.contextmanager
def model_and_cluster(config: RefitConfig, *, address: str | None, announce: Announce) -> Iterator[Path | None]:
    """The checkpoint that workers will load, made first where the configuration says so, and then `ray_cluster`.

    Raises:
        ConfigError: the checkpoint can't be read, or the tiny model can't be written; nothing has started.
        WorkerError: as `ray_cluster`.
    """
    folder, wanted = Path(config.policy.model_name), config.refit_run.tiny_model
    with contextlib.ExitStack() as stack:
        if wanted is not None:
            announce("making a tiny model, unless it is there")
            stack.enter_context(tiny_model(folder, wanted))
        # Workers would find it too, but only after half a minute, and one after the other.
        CheckpointReader(folder).check()
        announce("starting Ray")
        yield stack.enter_context(ray_cluster(address=address))


@contextlib.contextmanager
def _ray(address: str, **options: Any) -> Iterator[None]:
    # Ray would hide devices from workers that reserve none, and a CPU worker of vLLM must see what the driver sees.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The first failure is raised; Ray would print those that follow from it as well.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray tells of a dead worker on stdout, where our JSON goes, and has no switch for it; our error says it too.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # While it starts, Ray would answer SIGTERM itself, by leaving its own start wherever that is.
    ray._private.utils.set_sigterm_handler = lambda _: None
    with _ending_in_order() as go_on:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise WorkerError("ray", -1, "start", str(error).strip().splitlines()[0]) from error
        try:
            go_on()
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _ending_in_order() -> Iterator[Callable[[], None]]:
    """Lets SIGTERM and SIGHUP end the block as Ctrl-C does; the exit code is then 128 and the signal's number.

    Until the yielded function is called, signals wait: what is half started couldn't be ended. A second Ctrl-C doesn't
    wait. Only the main thread may set handlers; elsewhere whoever runs there decides. A signal that the process was
    told to ignore (`nohup`) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    received: list[int] = []
    started = threading.Event()

    def end(number: int, _: object) -> None:
        # Where Ray's own handler of SIGTERM ran first, it has set an alarm that aborts the process in three seconds.
        signal.alarm(0)
        received.append(number)
        # The only exception that gets through Ray's waits as it is.
        if received.count(signal.SIGINT) > 1 or (started.is_set() and len(received) == 1):
            raise KeyboardInterrupt

    def go_on() -> None:
        started.set()
        signal.signal(signal.SIGINT, previous[signal.SIGINT])
        if previous[signal.SIGTERM] is not signal.SIG_IGN:
            # Instead of Ray's, which writes stacks.
            signal.signal(signal.SIGTERM, end)
        if received:
            raise KeyboardInterrupt

    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield go_on
    except KeyboardInterrupt:
        if not received or received[0] == signal.SIGINT:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def running_job(
    config: RefitConfig, *, scratch: Path | None = None, settings: RefitSettings | None = None
) -> Iterator[RefitJob]:
    """Starts all workers of a configuration and releases them at the end of the block, whatever happens in it.

    `scratch` is where workers on this machine may leave sockets; None where they run on other machines too. `settings`
    are the configuration's own when None.

    Raises:
        ConfigError: a file for events or counters can't be written.
        WorkerError: a worker didn't start; names group, rank and phase.
    """
    run = config.refit_run
    with (
        observing(events=run.events, metrics=run.metrics) as observer,
        placed_groups(config, refit_roles(config), scratch=scratch) as placed,
    ):
        places, ports = placed.meeting_places()
        policy, *engines = placed.groups
        building = [policy.build(PolicyWorker, policy_arguments(config, policy, places[0]))]
        building += [building_engine(config, engine, place) for engine, place in zip(engines, places[1:], strict=True)]
        collect(building, timeout_s=config.refit_run.worker_timeout_s)
        synchronizer = synchronizer_of(
            config, policy, engines, ports=ports, host=placed.host, settings=settings, observer=observer
        )
        yield RefitJob(policy, tuple(engines), synchronizer)


@dataclass(frozen=True, slots=True)
class Role:
    """A group of a job: how many actors, and how many ranks each of them holds."""

    name: str
    actors: int
    ranks_each: int = 1

    @property
    def ranks(self) -> int:
        return self.actors * self.ranks_each


def refit_roles(config: RefitConfig) -> list[Role]:
    """The policy, then each engine: an actor per rank, or one for all of them where vLLM starts these itself."""
    each = _ranks_per_actor(config)
    actors = config.policy.generation.vllm_cfg.ranks // each
    engines = (Role(f"engine {i}", actors, each) for i in range(config.engines))
    return [Role("policy", config.training_ranks), *engines]


def _ranks_per_actor(config: RefitConfig) -> int:
    vllm = config.policy.generation.vllm_cfg
    return vllm.ranks if vllm.async_engine else 1


def synchronizer_of(
    config: RefitConfig,
    policy: WorkerGroup,
    engines: Sequence[WorkerGroup],
    *,
    ports: PortRange,
    host: str | None,
    settings: RefitSettings | None = None,
    observer: Observer | None = None,
) -> RefitSynchronizer:
    """Between built workers; `settings` are the configuration's own when None."""
    return RefitSynchronizer(
        policy,
        engines,
        settings=settings or config.refit_settings(),
        ports=ports,
        host=host,
        ranks_per_actor=_ranks_per_actor(config),
        observer=observer,
    )


def building_engine(
    config: RefitConfig, engine: WorkerGroup, place: Place, *, kv_cache: KvCache = "recompute"
) -> Pending:  # fmt: skip
    """Starts building an engine on its group; rank 0 listens at `place`. `kv_cache` is for asynchronous ones."""
    if not config.policy.generation.vllm_cfg.async_engine:
        return engine.build(GenerationWorker, engine_arguments(config, engine, place))
    own = {
        "config": engine_config(config),
        "kv_cache": kv_cache,
        "timeout_s": config.refit_run.worker_timeout_s,
    }
    return engine.build(AsyncGenerationWorker, [{**own, "node": node} for node in engine.nodes()])


@dataclass(frozen=True, slots=True)
class PlacedGroups:
    """A group for each role; where they may listen, and at which address (None: the node's).

    `starter` makes another one, which is released with these.
    """

    groups: tuple[WorkerGroup, ...]
    ports: PortRange
    host: str | None
    starter: Callable[[Role, float], WorkerGroup]

    def start(self, role: Role, *, timeout_s: float) -> tuple[WorkerGroup, Place]:
        """Another group for a role, in place of one that was released, and where it may listen.

        Raises:
            WorkerError: the cluster doesn't have the resources free within `timeout_s`.
        """
        group = self.starter(role, timeout_s)
        return group, Place(*group.address(self.ports, host=self.host))

    def meeting_places(self) -> tuple[list[Place], PortRange]:
        """An address and a port that is held at each group's rank 0, all different, and the ports to try next."""
        ports, places = self.ports, []
        for group in self.groups:
            place = Place(*group.address(ports, host=self.host))
            places.append(place)
            ports = ports.promising(place.port)
        return places, ports


class Place(NamedTuple):
    """Where a group's rank 0 can listen."""

    host: str
    port: int


@contextlib.contextmanager
def placed_groups(
    config: RefitConfig, roles: Sequence[Role], *, scratch: Path | None = None
) -> Iterator[PlacedGroups]:  # fmt: skip
    """Starts the actors of all roles, without workers yet, and releases them at the end of the block.

    Raises:
        WorkerError: the cluster doesn't have the resources.
    """
    each = _rank_resources(roles)
    environment = _environment(each, scratch)
    with contextlib.ExitStack() as stack:
        starter = partial(_group, stack, each, environment)
        groups = tuple(starter(role, config.refit_run.worker_timeout_s) for role in roles)
        ports = PortRange(config.cluster.master_port_range_low or 0, config.cluster.master_port_range_high or 0)
        yield PlacedGroups(groups, ports, None if config.cluster.num_nodes > 1 else LOOPBACK, starter)


def _group(
    stack: contextlib.ExitStack,
    each: Mapping[str, float],
    environment: Mapping[str, str],
    role: Role,
    timeout_s: float,
) -> WorkerGroup:
    resources = {kind: share * role.ranks_each for kind, share in each.items()}
    group = WorkerGroup(role.name, role.actors, resources=resources, environment=environment, timeout_s=timeout_s)
    stack.callback(group.release)
    return group


def _environment(resources: Mapping[str, float], scratch: Path | None) -> dict[str, str]:
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR"}
    if "GPU" not in resources:
        # One computing thread per rank, because ranks that share cores spin against each other; and no compilation of
        # vLLM's helpers, which takes longer than a small job.
        environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    if scratch is not None:
        # vLLM leaves sockets and files of process groups there.
        environment |= {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
    return environment


def _rank_resources(roles: Sequence[Role]) -> dict[str, float]:
    """A GPU per rank where the cluster has any; else an equal share of the CPUs, however few there are."""
    total, ranks = ray.cluster_resources(), sum(role.ranks for role in roles)
    if (gpus := total.get("GPU", 0)) > 0:
        if ranks > gpus:
            named = ", ".join(f"{role.name}: {role.ranks}" for role in roles)
            reason = f"{ranks} ranks ({named}) need a GPU each, and the Ray cluster has {gpus:g}"
            remedy = "lower cluster.gpus_per_node or cluster.num_nodes, or add nodes"
            raise WorkerError("job", -1, "placement", f"{reason}; {remedy}")
        return {"GPU": 1.0, "CPU": 1.0}
    cpus = total.get("CPU", 1.0)
    # Ray counts thousandths of a CPU.
    thousandths = int(1000 * min(1.0, cpus / ranks))
    if not thousandths:
        reason = f"{ranks} ranks are too many for {cpus:g} CPUs; lower cluster.gpus_per_node or cluster.num_nodes"
        raise WorkerError("job", -1, "placement", reason)
    return {"CPU": thousandths / 1000}


def policy_arguments(config: RefitConfig, group: WorkerGroup, place: Place) -> list[dict[str, Any]]:
    """For each rank's `PolicyWorker`; rank 0 listens at `place`."""
    arguments = training_arguments(config, group, place)
    return [{**own, "node": node} for own, node in zip(arguments, group.nodes(), strict=True)]


def training_arguments(config: RefitConfig, group: WorkerGroup, place: Place) -> list[dict[str, Any]]:
    """For each rank's `TrainingWorker` of the policy's cut; rank 0 listens at `place`."""
    megatron = config.policy.megatron_cfg
    common = {
        "world_size": group.count,
        "init_method": f"tcp://{place.host}:{place.port}",
        "checkpoint": str(Path(config.policy.model_name).resolve()),
        "parallelism": megatron.parallelism,
        "precision": config.policy.precision,
        "learning_rate": megatron.optimizer.lr,
        "make_vocab_size_divisible_by": megatron.make_vocab_size_divisible_by,
        "timeout_s": config.settings.timeout_s,
    }
    return [{"rank": rank, **common} for rank in range(group.count)]


def engine_arguments(config: RefitConfig, group: WorkerGroup, place: Place) -> list[dict[str, Any]]:
    """For each rank's `GenerationWorker`; rank 0 listens at `place`."""
    common = {"world_size": group.count, "host": place.host, "port": place.port, "config": engine_config(config)}
    return [{"rank": rank, "node": node, **common} for rank, node in enumerate(group.nodes())]


def engine_config(config: RefitConfig) -> EngineConfig:
    """How the job's engines are built."""
    vllm = config.policy.generation.vllm_cfg
    return EngineConfig(
        model=str(Path(config.policy.model_name).resolve()),
        dtype=config.vllm_precision,
        tensor_parallel=vllm.tensor_parallel_size,
        pipeline_parallel=vllm.pipeline_parallel_size,
        expert_parallel=vllm.expert_parallel_size > 1,
        max_model_len=vllm.max_model_len,
        load_format=vllm.load_format,
        enforce_eager=vllm.enforce_eager,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
    )


def agreed(groups: Sequence[WorkerGroup], method: str, *args: Any, timeout_s: float) -> Any:
    """Calls a method on every rank of the groups; returns their common answer.

    Raises:
        WorkerError: two ranks gave different answers.
    """
    answers = collect([group.start(method, *args) for group in groups], timeout_s=timeout_s)
    first = answers[0][0]
    for group, found in zip(groups, answers, strict=True):
        for rank, answer in found.items():
            if answer != first:
                raise WorkerError(group.name, rank, method, f"answers {answer}, rank 0 of {groups[0].name} {first}")
    return first
