"""Making the fabric that a refit's settings ask for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from refit_transport.config.settings import AVAILABLE_FABRICS, RefitSettings
from refit_transport.errors import TransferError
from refit_transport.fabrics.base import Fabric
from refit_transport.fabrics.deadline import Deadline, DeadlineCaller
from refit_transport.fabrics.gloo import GlooFabric, address_toward
from refit_transport.fabrics.rendezvous import ControlChannel
from refit_transport.fabrics.shared_memory import SharedExchange
from refit_transport.fabrics.shared_segment import SlotMemory, host_identity
from refit_transport.scheduling.topology import Topology

# gloo's own timeout counts anew for each of its steps. Where the first one is missed, its error says more.
_GLOO_FIRST_S = 1.0


def connect_fabric(
    channel: ControlChannel, topology: Topology, settings: RefitSettings, *, slot_bytes: int, deadline: Deadline
) -> Fabric:
    """Connects all ranks of the channel; collective.

    Args:
        channel: the refit's control channel.
        topology: which ranks are near; only they exchange through shared memory, and only inside one host.
        settings: which fabric.
        slot_bytes: the slot memory that the refit's programs need on this rank, in bytes.
        deadline: for finding the peers.

    Raises:
        TransferError: the fabric isn't available, or a peer didn't come.
    """
    if settings.fabric not in AVAILABLE_FABRICS:
        reason = f"fabric {settings.fabric!r} is not available yet: set refit_cfg's fabric to gloo or auto"
        raise TransferError(channel.rank, -1, "connect", "", reason)
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
        memory = torch.empty(slot_bytes, dtype=torch.uint8)
    connect = partial(
        GlooFabric,
        channel.group_store("gloo"),
        rank=channel.rank,
        world_size=channel.world_size,
        address=address_toward(channel.host),
        timeout_s=settings.timeout_s,
        memory=memory,
        exchange=exchange,
    )
    try:
        return DeadlineCaller().call(connect, timeout_s=settings.timeout_s + _GLOO_FIRST_S)
    except TimeoutError as error:
        late = f"not every rank connected within {settings.timeout_s:g} s (timeout_s)"
        raise TransferError(channel.rank, -1, "connect", "", f"{late}: one of them stopped or is cut off") from error


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
