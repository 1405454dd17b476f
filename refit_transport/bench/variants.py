"""The ways of refitting that a case compares, and the settings that make each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from refit_transport.bench.lab import Wiring
from refit_transport.bench.workload import Model
from refit_transport.config.settings import RefitSettings
from refit_transport.scheduling.scheduler import PassName

# A refit in the lab takes seconds; this is how long a broken one may hold up the rest.
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of refitting.

    name: its key in tables and figures. transport: the registry's name. disabled: schedule passes that are off.
    chains: of `gather_broadcast`, one chain per NIC or a single one. shared_memory: between ranks of one host.
    model: refits this model and not the case's.
    """

    name: str
    transport: str = "nccl_reshard"
    disabled: tuple[PassName, ...] = ()
    chains: Literal["nic", "single"] = "nic"
    shared_memory: Literal["auto", "off"] = "auto"
    model: Model | None = None


FLAT_PASSES: tuple[PassName, ...] = ("local", "deduplicate", "balance", "stripe", "forward")

OURS = Variant("ours")
FLAT = Variant("flat", disabled=FLAT_PASSES)
FLAT_TCP = Variant("flat over TCP", disabled=FLAT_PASSES, shared_memory="off")
WITHOUT_BALANCE = Variant("without balance", disabled=("balance",))
WITHOUT_FORWARD = Variant("without forward", disabled=("forward",))
WITHOUT_SHARED_MEMORY = Variant("without shared memory", shared_memory="off")
GATHER_BROADCAST = Variant("gather_broadcast", transport="gather_broadcast")
SINGLE_CHAIN = Variant("gather_broadcast, single chain", transport="gather_broadcast", chains="single")


def settings_of(variant: Variant, wiring: Wiring) -> RefitSettings:
    """The settings of a variant in a lab."""
    return RefitSettings(
        transport=variant.transport,
        coverage="all",
        domains=wiring.nodes,
        timeout_s=_TIMEOUT_S,
        nics=wiring.nics,
        disabled_passes=variant.disabled,
        chains=variant.chains,
        shared_memory=variant.shared_memory,
    )
