"""The settings of a refit as plain values: what every rank must agree on. No YAML, no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from refit_transport.planning.routing import Coverage, RouteRule
from refit_transport.scheduling.broadcast import ChainKind
from refit_transport.scheduling.scheduler import PassName

Commit = Literal["in_place", "staged"]
Verify = Literal["off", "sample", "full"]
SharedMemory = Literal["auto", "off"]
Nics = Literal["auto", "domain", "rank"]
FabricName = Literal["auto", "gloo", "nccl", "nccl_m2n"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RefitSettings:
    """Everything about a refit that isn't a layout; rank 0 hands it to the others.

    transport: the registry's name of what `refit_transport` selects.
    fabric: what moves bytes; "auto" is nccl where every rank's weights are on a GPU of its own and torch has NCCL, and
        gloo elsewhere.
    coverage, routes: which tensors go shard-to-shard (only with `nccl_reshard`).
    domains: topology domains as lists of refit ranks; None: from where the ranks are, see `places.topology_of`.
    nics: whether the ranks of a domain share one NIC or have one each; senders are chosen to keep all equally busy.
    nic_rates: bytes per second of each NIC and direction: none known, one for all, or one for each of `domains`.
    disabled_passes: scheduling passes of nccl_reshard that are switched off, to see what they are worth.
    chains: gather_broadcast's chains, one per NIC of a domain or a single one.
    shared_memory: "auto" lets ranks of one host exchange through shared memory, "off" only over TCP.
    bucket_bytes: size of one payload at most. staging_bytes: payload slots and staging of one rank at most.
    timeout_s: the deadline of every phase, in seconds.
    verify: whether what the targets hold is compared with the sources before a refit ends.
    commit: "in_place" writes into the weights, which nobody may use until the refit is complete; "staged" receives
        beside them, in memory of the same size, and takes over when every rank has everything.
    """

    transport: str = "nccl_reshard"
    fabric: FabricName = "auto"
    coverage: Coverage = "ffn"
    routes: tuple[RouteRule, ...] = ()
    domains: tuple[tuple[int, ...], ...] | None = None
    nics: Nics = "auto"
    nic_rates: tuple[float, ...] = ()
    disabled_passes: tuple[PassName, ...] = ()
    chains: ChainKind = "nic"
    shared_memory: SharedMemory = "auto"
    bucket_bytes: int = MIB
    staging_bytes: int = 16 * MIB
    timeout_s: float = 300.0
    verify: Verify = "off"
    commit: Commit = "in_place"

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
                "disabled_passes": tuple(value["disabled_passes"]),
                "nic_rates": tuple(value["nic_rates"]),
                "domains": None if domains is None else tuple(map(tuple, domains)),
            }
        )
