"""Where the ranks of a refit are, and the topology that follows: published by each rank, equal on all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from refit_transport.config.settings import FabricName, RefitSettings
from refit_transport.fabrics.nvlink import nvlink_domain
from refit_transport.scheduling.topology import NicKind, Topology


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank is.

    host: its host's name. node: its node's id in the cluster, "" where nobody gives one; it counts more than the host's
    name, which containers may share. gpu: the uuid of the GPU that holds its weights, "" for host memory. nvlink: the
    NVLink domain of that GPU where it reaches beyond the host, else "".
    """

    host: str
    node: str = ""
    gpu: str = ""
    nvlink: str = ""

    @property
    def machine(self) -> str:
        """Equal on two ranks of one machine."""
        return f"node {self.node}" if self.node else f"host {self.host}"


def place_here(
    devices: Iterable[torch.device], *, node: str = "", nvlink: Callable[[str], str] = nvlink_domain
) -> Place:
    """This process's place, for weights on these devices."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    uuid = "" if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid)
    return Place(socket.gethostname(), node, uuid, nvlink(uuid) if uuid else "")


def topology_of(places: Mapping[int, Place], settings: RefitSettings) -> Topology:
    """The machine graph: what the settings say, and for `auto` what the ranks' places say. Pure.

    auto domains: an NVLink domain, else a machine. auto NICs: a NIC for each rank where bytes go from GPU to GPU, else
    one for each domain.

    >>> here, there = Place("a"), Place("b")
    >>> topology_of({0: here, 1: here, 2: there}, RefitSettings()).domains
    ((0, 1), (2,))
    >>> rack = [Place(f"host{r // 2}", gpu=f"gpu{r}", nvlink="rack/1") for r in range(4)]
    >>> topology = topology_of(dict(enumerate(rack)), RefitSettings(fabric="nccl"))
    >>> topology.domains, len(topology.nics)
    (((0, 1, 2, 3),), 4)
    """
    on_gpus = _go_from_gpu_to_gpu(places.values(), settings.fabric)
    domains: Iterable[Iterable[int]]
    if settings.domains is not None:
        domains = settings.domains
    else:
        found: dict[str, list[int]] = {}
        for rank, place in places.items():
            found.setdefault(f"nvlink {place.nvlink}" if on_gpus and place.nvlink else place.machine, []).append(rank)
        domains = found.values()
    nics: NicKind = settings.nics if settings.nics != "auto" else "rank" if on_gpus else "domain"
    if not settings.nic_rates:
        return Topology.of(domains, nics=nics)
    rates = settings.nic_rates
    return Topology.of(domains, nics=nics, nic_rate=rates[0] if len(rates) == 1 else rates)


def _go_from_gpu_to_gpu(places: Iterable[Place], fabric: FabricName) -> bool:
    """Whether the fabric is one of GPUs; `auto` takes one when every rank has a GPU of its own."""
    if fabric != "auto":
        return fabric != "gloo"
    gpus = [place.gpu for place in places]
    return all(gpus) and len(set(gpus)) == len(gpus)
