"""A control channel among the ranks of a torch process group, whose store tells them where to meet."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_process_group_store

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import DeadlineCaller
from refit_transport.fabrics.gloo import address_toward
from refit_transport.fabrics.rendezvous import ControlChannel, Meeting

_NAME_SPACE = "refit_transport"


@dataclass(frozen=True, slots=True)
class GroupChannel:
    """This process in a process group: its channel, whose ranks are the group's, and everyone's global rank.

    `global_ranks` is in the order of the group's ranks, as device meshes number processes.
    """

    channel: ControlChannel
    global_ranks: tuple[int, ...]


def join_group(
    group: dist.ProcessGroup, *, timeout_s: float, others: int = 0, host: str | None = None, port: int = 0
) -> GroupChannel:
    """Opens a fresh channel among the ranks of `group`; never communicates over the group.

    `others` more ranks, after the group's, may join it by what `channel.meeting` says. Rank 0 listens at `host` (None:
    its address toward the group's store) and `port` (0: any free one).

    The n-th call on one rank meets the n-th call on every other. Each rank counts in the store itself, so the count
    begins anew with each group. Who can read the group's store can take part.

    Raises:
        TransferError: this process isn't in the group, or its rank 0 didn't come to this call within `timeout_s`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise TransferError(dist.get_rank(), -1, "rendezvous", "", "this process isn't in the given process group")
    shared = _get_process_group_store(group)
    try:
        own = host or address_toward(_host(shared))
        opening = partial(_open, shared, rank, size, own, port, others=others, patience_s=timeout_s)
        channel = DeadlineCaller().call(opening, timeout_s=timeout_s)
    except (TimeoutError, RuntimeError) as error:
        reason = f"rank 0 of the process group left no address in its store: {str(error).splitlines()[0]}"
        raise TransferError(rank, 0, "rendezvous", "", reason) from error
    return GroupChannel(channel, tuple(dist.get_process_group_ranks(group)))


def _open(
    shared: Store, rank: int, size: int, host: str, port: int, *, others: int, patience_s: float
) -> ControlChannel:  # fmt: skip
    # Over the group's connection: TCPStore answers a new one within milliseconds or, now and then, in 5 s.
    own = PrefixStore(_NAME_SPACE, shared)
    call = PrefixStore(f"call {own.add(f'calls of {rank}', 1)}", own)
    if rank == 0:
        channel = ControlChannel.listen(host=host, port=port, world_size=size + others, timeout_s=patience_s)
        if size > 1:
            call.set("meeting", json.dumps(asdict(channel.meeting)))
        return channel
    meeting = Meeting(**json.loads(call.get("meeting")))
    if call.add("readers", 1) == size - 1:
        call.delete_key("meeting")
        call.delete_key("readers")
    return ControlChannel.join(meeting, rank=rank, world_size=size + others, timeout_s=patience_s)


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
