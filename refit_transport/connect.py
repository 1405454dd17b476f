"""Making the fabric that a refit's settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch

from refit_transport.config.settings import FabricName, RefitSettings
from refit_transport.errors import TransferError
from refit_transport.fabrics.base import Fabric
from refit_transport.fabrics.cuda import CudaDevice, gpu_identity, gpu_of, make_group, obstacles
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.fabrics.gloo import GlooFabric, address_toward
from refit_transport.fabrics.nccl import NcclFabric
from refit_transport.fabrics.nccl_m2n import NcclM2nFabric, load_m2n, m2n_obstacles
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.secret import Secret
from refit_transport.fabrics.shared_memory import SharedExchange
from refit_transport.fabrics.shared_segment import SlotMemory, host_identity
from refit_transport.scheduling.topology import Topology

T = TypeVar("T")

# gloo's own timeout counts anew for each of its steps. Where the first one is missed, its error says more.
_FIRST_S = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank can do: its GPU (an identity, "" without one), and why it can't use each kind of NCCL fabric."""

    gpu: str
    obstacles: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, buffers: Mapping[str, torch.device], *, fabric: FabricName) -> Self:
        """This process's offer, for buffers on these devices."""
        found = {"nccl": obstacles(buffers)}
        if fabric == "nccl_m2n":
            found["nccl_m2n"] = m2n_obstacles()
        usable = buffers and not found["nccl"]
        return cls(gpu_identity(gpu_of(buffers.values())) if usable else "", found)


def choose_fabric(wanted: FabricName, offers: Sequence[Offer]) -> FabricName:
    """The fabric of a refit, from every rank's offer; all ranks come to the same answer.

    Raises:
        TransferError: the wanted fabric can't be had; naming the first rank that can't, and why.

    >>> gpu, cpu = Offer("GPU-1", {"nccl": ()}), Offer("", {"nccl": ("it sees no CUDA device",)})
    >>> choose_fabric("auto", [gpu, cpu]), choose_fabric("auto", [gpu]), choose_fabric("gloo", [gpu])
    ('gloo', 'nccl', 'gloo')
    >>> choose_fabric("nccl", [gpu, cpu])
    Traceback (most recent call last):
    refit_transport.errors.TransferError: refit: rank 1, phase connect: fabric nccl can't be used: rank 1: it sees no \
CUDA device; set refit_cfg's fabric to gloo or auto
    """
    if wanted == "gloo":
        return "gloo"
    missing = [
        (rank, reason)
        for rank, offer in enumerate(offers)
        for reasons in offer.obstacles.values()
        for reason in reasons
    ]
    owners: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        first = owners.setdefault(offer.gpu, rank) if offer.gpu else rank
        if first != rank:
            missing.append((rank, f"it has the same GPU as rank {first}, NCCL needs one for each rank"))
        elif not offer.gpu and not any(offer.obstacles.values()):
            missing.append((rank, "it holds no buffer on a GPU"))
    if wanted == "auto":
        return "gloo" if missing else "nccl"
    if not missing:
        return wanted
    rank = missing[0][0]
    what = "; ".join(reason for other, reason in missing if other == rank)
    others = sorted({other for other, _ in missing if other != rank})
    also = f" (also ranks {', '.join(map(str, others))})" if others else ""
    reason = f"fabric {wanted} can't be used: rank {rank}: {what}{also}; set refit_cfg's fabric to gloo or auto"
    raise TransferError(rank, -1, "connect", "", reason)


def connect_fabric(
    channel: ControlChannel,
    topology: Topology,
    settings: RefitSettings,
    *,
    slot_bytes: int,
    deadline: Deadline,
    buffers: Mapping[str, torch.device] | None = None,
) -> Fabric:
    """Connects all ranks of the channel; collective.

    Args:
        channel: the refit's control channel.
        topology: which ranks are near; only they exchange through shared memory, and only inside one host.
        settings: which fabric.
        slot_bytes: the slot memory that the refit's programs need on this rank, in bytes.
        deadline: for finding the peers.
        buffers: the devices of this rank's weights, by buffer; none means that they are on the CPU.

    Raises:
        TransferError: the fabric can't be had, or a peer didn't come.
    """
    devices = buffers or {}
    name: FabricName = settings.fabric
    if name != "gloo":
        channel.publish("offer", asdict(Offer.of(devices, fabric=name)))
        offers = [Offer(**value) for value in channel.collect("offer", range(channel.world_size), deadline=deadline)]
        name = choose_fabric(name, offers)
    if name == "gloo":
        return _connect_gloo(channel, topology, settings, slot_bytes=slot_bytes, deadline=deadline)
    return _connect_nccl(channel, settings, name, gpu_of(devices.values()), slot_bytes=slot_bytes)


def _connect_nccl(
    channel: ControlChannel, settings: RefitSettings, name: FabricName, device: torch.device, *, slot_bytes: int
) -> Fabric:
    make = partial(
        make_group,
        channel.group_store("nccl"),
        rank=channel.rank,
        world_size=channel.world_size,
        device=device,
        timeout_s=settings.timeout_s,
    )
    group = _within(channel, settings, make)
    memory = _slot_memory(slot_bytes, device)
    fabric = NcclFabric(group, device=CudaDevice(device), rank=channel.rank, memory=memory, failure=channel.failure)
    return NcclM2nFabric(fabric, load_m2n()) if name == "nccl_m2n" else fabric


def _slot_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _within(channel: ControlChannel, settings: RefitSettings, connect: Callable[[], T]) -> T:
    """What `connect` returns, in time."""
    try:
        return DeadlineCaller().call(connect, timeout_s=settings.timeout_s + _FIRST_S)
    except TimeoutError as error:
        late = f"not every rank connected within {settings.timeout_s:g} s (timeout_s)"
        raise TransferError(channel.rank, -1, "connect", "", f"{late}: one of them stopped or is cut off") from error


def _connect_gloo(
    channel: ControlChannel, topology: Topology, settings: RefitSettings, *, slot_bytes: int, deadline: Deadline
) -> Fabric:
    near = _near(channel, topology, settings, deadline)
    exchange = None
    if near:
        segment = SlotMemory(slot_bytes, rank=channel.rank)
        exchange = SharedExchange.connect(
            segment,
            rank=channel.rank,
            peers=near,
            publish=channel.publish,
            collect=partial(channel.collect, deadline=deadline),
            failure=channel.failure,
            deadline=deadline,
        )
        memory = segment.tensor
        segment.close()
    else:
        memory = _slot_memory(slot_bytes, torch.device("cpu"))
    if channel.rank == 0:
        channel.publish("gloo", Secret.new().text)
    [secret] = channel.collect("gloo", (0,), deadline=deadline)
    connect = partial(
        GlooFabric,
        channel.group_store("gloo"),
        rank=channel.rank,
        world_size=channel.world_size,
        address=address_toward(channel.host),
        timeout_s=settings.timeout_s,
        memory=memory,
        secret=Secret(secret),
        exchange=exchange,
    )
    return _within(channel, settings, connect)


def _near(channel: ControlChannel, topology: Topology, settings: RefitSettings, deadline: Deadline) -> list[int]:
    """The other ranks of this one's domain that share memory with it; both ends come to the same answer."""
    everyone: Iterable[int] = sorted(topology.ranks.intersection(range(channel.world_size)))
    if settings.shared_memory == "off" or channel.rank not in everyone:
        return []
    channel.publish("memory", host_identity())
    hosts: dict[int, Any] = dict(zip(everyone, channel.collect("memory", everyone, deadline=deadline), strict=True))
    return [
        rank
        for rank in everyone
        if rank != channel.rank and hosts[rank] == hosts[channel.rank] and topology.is_local(rank, channel.rank)
    ]
