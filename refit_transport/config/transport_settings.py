"""Settings of the transports: `policy.generation.refit_cfg`."""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from refit_transport.config.base import MIB, Bytes, Number, Section

Ranks = tuple[int, ...]
Fabric = Literal["auto", "loopback", "gloo", "nccl", "nccl_m2n"]
_REGEX = "re:"


class Route(Section):
    """Sends the parameters whose canonical name matches by one transport; the first route that matches decides.

    A pattern is a glob over the whole name, or with the prefix `re:` a regular expression that is searched for.

    >>> Route(pattern="*.mlp.*", transport="nccl_reshard").matches("model.layers.0.mlp.up_proj.weight")
    True
    >>> Route(pattern="re:layers[.][02][.]", transport="gather_broadcast").matches("model.layers.1.mlp.up_proj.weight")
    False
    """

    pattern: Annotated[str, Field(min_length=1)]
    transport: Literal["nccl_reshard", "gather_broadcast"]

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            _compiled(pattern)
        except re.error as error:
            raise ValueError(f"must be a regular expression after {_REGEX!r} ({error})") from None
        return pattern

    def matches(self, name: str) -> bool:
        return _compiled(self.pattern).search(name) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith(_REGEX):
        return re.compile(pattern.removeprefix(_REGEX))
    return re.compile(rf"\A{fnmatch.translate(pattern)}")


def _domains_form(value: object) -> object:
    is_lists = isinstance(value, list | tuple) and all(
        isinstance(ranks, list | tuple) and all(type(rank) is int and rank >= 0 for rank in ranks) for ranks in value
    )
    if not is_lists and value not in ("auto", "single", "per_role"):
        raise ValueError("must be auto, single, per_role, or lists of refit ranks such as [[0, 1], [2, 3]]")
    return value


class Topology(Section):
    """Which refit ranks share a fast domain (a host, or an NVLink island).

    Refit ranks: the training ranks first, in Megatron's order, then the generation ranks, engine by engine.
    """

    # auto: one domain per host. single: all ranks in one. per_role: training ranks in one, generation ranks in another.
    # Or lists of refit ranks that name every rank once.
    domains: Annotated[Literal["auto", "single", "per_role"] | tuple[Ranks, ...], BeforeValidator(_domains_form)] = (
        "auto"
    )


class TransportSettings(Section):
    """`refit_cfg.gather_broadcast`, and the part of `refit_cfg.nccl_reshard` that both transports share."""

    # auto: nccl where the ranks have CUDA devices, gloo elsewhere.
    fabric: Fabric = "auto"
    topology: Topology = Topology()
    # Extra memory of one rank during a refit; a number of bytes or text such as "64MiB".
    staging_bytes: Bytes = ByteSize(16 * MIB)
    # Small tensors are packed into messages of this size: a quarter of the staging memory unless set.
    bucket_bytes: Bytes = Field(default_factory=lambda known: ByteSize(max(1, known["staging_bytes"] // 4)))
    # Large tensors are cut into pieces of this size, so that the stages overlap: 1 MiB or the bucket unless set.
    chunk_bytes: Bytes = Field(default_factory=lambda known: ByteSize(min(MIB, known["bucket_bytes"])))
    # Seconds until a rank that waits for another gives up and the refit fails.
    timeout_s: Annotated[Number, Field(gt=0)] = 300.0
    # What is compared after the transfer: nothing, a checksum of a sample of the boxes, or of all.
    verify: Literal["off", "sample", "full"] = "sample"
    commit: Literal["in_place", "staged"] = "in_place"


class NcclReshardSettings(TransportSettings):
    """`refit_cfg.nccl_reshard`."""

    # ffn: FFN projections go shard to shard and the rest by gather_broadcast. all: everything describable does.
    coverage: Literal["ffn", "all"] = "ffn"
    # Decided before `coverage`.
    routes: tuple[Route, ...] = ()


class RefitSettings(Section):
    """`policy.generation.refit_cfg`: settings by transport name. Those of other transports stay in the document."""

    nccl_reshard: NcclReshardSettings = NcclReshardSettings()
    gather_broadcast: TransportSettings = TransportSettings()
