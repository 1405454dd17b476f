"""Settings of the transports: `policy.generation.refit_cfg`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from refit_transport.config.base import MIB, Bytes, Number, Section
from refit_transport.config.settings import Commit, FabricName, Nics, SharedMemory
from refit_transport.planning.routing import RouteRule
from refit_transport.scheduling.broadcast import ChainKind
from refit_transport.scheduling.scheduler import PassName

Ranks = tuple[int, ...]


class Route(Section):
    """Sends the parameters whose canonical name matches by one transport; the first route that matches decides.

    See `planning.routing.RouteRule` for patterns.
    """

    pattern: Annotated[str, Field(min_length=1)]
    transport: Literal["nccl_reshard", "gather_broadcast"]

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            RouteRule(pattern, "")
        except re.error as error:
            raise ValueError(f"must be a regular expression after 're:' ({error})") from None
        return pattern


def _domains_form(value: object) -> object:
    is_lists = isinstance(value, list | tuple) and all(
        isinstance(ranks, list | tuple) and all(type(rank) is int and rank >= 0 for rank in ranks) for ranks in value
    )
    if not is_lists and value not in ("auto", "single", "per_role"):
        raise ValueError("must be auto, single, per_role, or lists of refit ranks such as [[0, 1], [2, 3]]")
    return value


def _listed(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _off_is_a_word(value: object) -> object:
    return "off" if value is False else value


class Topology(Section):
    """Which refit ranks share a fast domain (a host, or an NVLink island).

    Refit ranks: the training ranks first, in Megatron's order, then the generation ranks, engine by engine.
    """

    # auto: one domain per host (inside Ray per node), or per NVLink domain where one joins GPUs of several hosts.
    # single: all ranks in one. per_role: training ranks in one, generation ranks in another. Or lists of refit ranks
    # that name every rank once.
    domains: Annotated[Literal["auto", "single", "per_role"] | tuple[Ranks, ...], BeforeValidator(_domains_form)] = (
        "auto"
    )
    # What reaches the network: one NIC that all ranks of a domain share, or one for each rank. auto: one for each rank
    # where bytes go from GPU to GPU, else one for each domain.
    nics: Nics = "auto"
    # Bytes per second of each NIC, such as "50GB"; or a list, one for each of the domains. They only matter where they
    # differ, and for predicted times.
    nic_rates: Annotated[tuple[Bytes, ...], BeforeValidator(_listed)] = ()


class TransportSettings(Section):
    """What both transports' settings have."""

    # gloo sends from host memory, nccl between GPUs; nccl_m2n gives NCCL M2N the tensors that it can move whole.
    # auto: nccl where every rank's weights are on a GPU of its own and torch has NCCL, gloo elsewhere.
    fabric: FabricName = "auto"
    topology: Topology = Topology()
    # Extra memory of one rank during a refit; a number of bytes or text such as "64MiB".
    staging_bytes: Bytes = ByteSize(16 * MIB)
    # Size of one payload at most: small tensors are packed, large ones cut. A sixteenth of the staging memory unless
    # set, so that several payloads are on their way at a time.
    bucket_bytes: Bytes = Field(default_factory=lambda known: ByteSize(max(1, known["staging_bytes"] // 16)))
    # auto: ranks of one host and domain exchange through shared memory. off: over TCP, as between hosts.
    shared_memory: Annotated[SharedMemory, BeforeValidator(_off_is_a_word)] = "auto"
    # Seconds that a phase of the refit may take: meeting, planning, a whole transfer with its verification.
    timeout_s: Annotated[Number, Field(gt=0)] = 300.0
    # What is compared after the transfer: nothing, a checksum of a sample of the boxes, or of all.
    # YAML reads a bare `off` as false.
    verify: Annotated[Literal["off", "sample", "full"], BeforeValidator(_off_is_a_word)] = "sample"
    # in_place: into the weights, while generation stands still; a refit that fails midway leaves an engine fenced.
    # staged: beside them, while the old version is served, in as much memory again; taken over when all have arrived.
    commit: Commit = "in_place"


class NcclReshardSettings(TransportSettings):
    """`refit_cfg.nccl_reshard`."""

    # ffn: FFN projections go shard to shard and the rest by gather_broadcast. all: everything describable does.
    coverage: Literal["ffn", "all"] = "ffn"
    # Decided before `coverage`.
    routes: tuple[Route, ...] = ()
    # Scheduling passes to switch off, to see what each is worth: local, deduplicate, balance, stripe, forward, relay.
    disabled_passes: tuple[PassName, ...] = ()


class GatherBroadcastSettings(TransportSettings):
    """`refit_cfg.gather_broadcast`."""

    # nic: as many chains as a domain has NICs, each over one of them. single: one chain.
    chains: ChainKind = "nic"


class RefitCfg(Section):
    """`policy.generation.refit_cfg`: settings by transport name. Those of other transports stay in the document."""

    nccl_reshard: NcclReshardSettings = NcclReshardSettings()
    gather_broadcast: GatherBroadcastSettings = GatherBroadcastSettings()
