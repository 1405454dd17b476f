"""The settings of a refit as plain values: what every rank must agree on. No YAML, no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from refit_transport.planning.routing import Coverage, RouteRule

Verify = Literal["off", "sample", "full"]
FabricName = Literal["auto", "gloo", "nccl", "nccl_m2n"]
AVAILABLE_FABRICS: tuple[FabricName, ...] = ("auto", "gloo")

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RefitSettings:
    """Everything about a refit that isn't a layout; rank 0 hands it to the others.

    transport: the registry's name of what `refit_transport` selects.
    fabric: what moves bytes; "auto" is gloo, and the NCCL fabrics are not available yet.
    coverage, routes: which tensors go shard-to-shard (only with `nccl_reshard`).
    domains: topology domains as lists of refit ranks; None: one domain per host.
    bucket_bytes: payload of one message at most. staging_bytes: message slots and staging of one rank at most.
    timeout_s: the deadline of every phase, in seconds.
    verify: whether what the targets hold is compared with the sources before a refit ends.
    """

    transport: str = "nccl_reshard"
    fabric: FabricName = "auto"
    coverage: Coverage = "ffn"
    routes: tuple[RouteRule, ...] = ()
    domains: tuple[tuple[int, ...], ...] | None = None
    bucket_bytes: int = 4 * MIB
    staging_bytes: int = 64 * MIB
    timeout_s: float = 300.0
    verify: Verify = "off"

    def to_json(self) -> dict[str, Any]:
        """A plain value for the control channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        domains = value["domains"]
        return cls(
            **{
                **value,
                "routes": tuple(RouteRule(**rule) for rule in value["routes"]),
                "domains": None if domains is None else tuple(map(tuple, domains)),
            }
        )
