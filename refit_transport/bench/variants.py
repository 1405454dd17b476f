"""The ways of refitting that a case compares, and the settings that make each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from refit_transport.bench.lab import Wiring
from refit_transport.bench.workload import Model
from refit_transport.config.settings import FabricName, RefitSettings, Verify
from refit_transport.planning.routing import Coverage
from refit_transport.scheduling.scheduler import PassName

# A refit in the lab takes seconds; this is how long a broken one may hold up the rest.
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of refitting.

    name: its key in tables and figures. transport: the registry's name. disabled: schedule passes that are off.
    chains: of `gather_broadcast`, one chain per NIC or a single one. shared_memory: between ranks of one host.
    coverage: of `nccl_reshard`. fabric: what moves the bytes. verify: whether targets are compared with the sources; as
        in the settings when None. model: refits this model and not the case's.
    """

    name: str
    transport: str = "nccl_reshard"
    disabled: tuple[PassName, ...] = ()
    chains: Literal["nic", "single"] = "nic"
    shared_memory: Literal["auto", "off"] = "auto"
    coverage: Coverage = "all"
    fabric: FabricName = "auto"
    verify: Verify | None = None
    model: Model | None = None

    def applied_to(self, settings: RefitSettings) -> RefitSettings:
        """Settings of this variant; what a variant doesn't say stays, but routes, which would override its coverage."""
        return replace(
            settings,
            transport=self.transport,
            coverage=self.coverage,
            routes=(),
            disabled_passes=self.disabled,
            chains=self.chains,
            shared_memory=self.shared_memory,
            fabric=self.fabric,
            verify=settings.verify if self.verify is None else self.verify,
        )


FLAT_PASSES: tuple[PassName, ...] = ("local", "deduplicate", "balance", "stripe", "forward")

OURS = Variant("ours")
VERIFIED = Variant("verified", verify="full")
FLAT = Variant("flat", disabled=FLAT_PASSES)
FLAT_TCP = Variant("flat over TCP", disabled=FLAT_PASSES, shared_memory="off")
WITHOUT_BALANCE = Variant("without balance", disabled=("balance",))
WITHOUT_FORWARD = Variant("without forward", disabled=("forward",))
WITHOUT_SHARED_MEMORY = Variant("without shared memory", shared_memory="off")
GATHER_BROADCAST = Variant("gather_broadcast", transport="gather_broadcast")
SINGLE_CHAIN = Variant("gather_broadcast, single chain", transport="gather_broadcast", chains="single")


def settings_of(variant: Variant, wiring: Wiring) -> RefitSettings:
    """The settings of a variant in a lab."""
    return variant.applied_to(RefitSettings(domains=wiring.nodes, nics=wiring.nics, timeout_s=_TIMEOUT_S))
