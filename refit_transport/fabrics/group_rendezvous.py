"""A control channel in the store of a torch process group, which has nothing else to do for it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_process_group_store

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import DeadlineCaller
from refit_transport.fabrics.rendezvous import ControlChannel

_NAME_SPACE = "refit_transport"


@dataclass(frozen=True, slots=True)
class GroupChannel:
    """This process in a process group: its channel, whose ranks are the group's, and everyone's global rank.

    `global_ranks` is in the order of the group's ranks, as device meshes number processes.
    """

    channel: ControlChannel
    global_ranks: tuple[int, ...]


def join_group(group: dist.ProcessGroup, *, timeout_s: float) -> GroupChannel:
    """Opens a fresh channel among the ranks of `group`; returns at once, and never communicates over the group.

    The n-th call on one rank meets the n-th call on every other. Each rank counts in the store itself, so the count
    begins anew with each group. The store outlives a failed rank's channel, so a rank that comes late still finds the
    cause.

    Raises:
        TransferError: this process isn't in the group, or the group's store doesn't answer within `timeout_s`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise TransferError(dist.get_rank(), -1, "rendezvous", "", "this process isn't in the given process group")
    shared = _get_process_group_store(group)
    try:
        store = DeadlineCaller().call(_open, shared, rank, timeout_s=timeout_s)
    except (TimeoutError, RuntimeError) as error:
        reason = f"the process group's store doesn't answer: {str(error).splitlines()[0]}"
        raise TransferError(rank, -1, "rendezvous", "", reason) from error
    where = "in the process group's store"
    channel = ControlChannel(store, host=_host(shared), rank=rank, world_size=size, timeout_s=timeout_s, where=where)
    return GroupChannel(channel, tuple(dist.get_process_group_ranks(group)))


def _open(shared: Store, rank: int) -> Store:
    # Over the group's connection: TCPStore answers a new one within milliseconds or, now and then, in 5 s.
    own = PrefixStore(_NAME_SPACE, shared)
    return PrefixStore(f"call {own.add(f'calls of {rank}', 1)}", own)


def _host(store: Store) -> str:
    """An address that every rank's interface toward the others reaches: the store's, where it has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
