"""Exchange between ranks of one host: a receiver reads the sender's slots where they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Self
from weakref import WeakSet

import torch

from refit_transport.errors import TransferError
from refit_transport.fabrics.deadline import Deadline
from refit_transport.fabrics.shared_link import Link
from refit_transport.fabrics.shared_rendezvous import meet
from refit_transport.fabrics.shared_segment import SlotMemory


class SharedExchange:
    """One rank's connections to the ranks of its host. One thread uses it.

    The sender fills a slot of its own segment and `offer`s it, to several peers if need be; each `take`s it, reads, and
    `acknowledge`s. Once the offer is settled with each of them the slot is free. Every error is a `TransferError` that
    names the peer, and leaves the exchange fit only for `close`, from which the peers learn at once.

    Peers take offers in the order they were made; they may acknowledge in any order.
    """

    def __init__(self, links: dict[int, Link], *, rank: int) -> None:
        self._links, self._rank = links, rank
        _open_exchanges.add(self)

    @classmethod
    def connect(
        cls,
        memory: SlotMemory,
        *,
        rank: int,
        peers: Iterable[int],
        publish: Callable[[str, Any], None],
        collect: Callable[[str, Iterable[int]], list[Any]],
        failure: Callable[[], Exception | None],
        deadline: Deadline,
        topic: str = "shared_memory",
    ) -> Self:
        """Connects `rank` with its peers. Collective: each calls this with the others as its peers.

        `publish(topic, value)`, `collect(topic, ranks)` and `failure()` are the control channel's. A topic serves one
        connect.

        Raises:
            TransferError: phase connect; a peer didn't come or left, or the system lacks memory or files.
            Exception: what `failure` returned while this rank waited.
        """
        links = meet(
            memory,
            rank=rank,
            peers=peers,
            publish=publish,
            collect=collect,
            failure=failure,
            topic=topic,
            deadline=deadline,
        )
        return cls(links, rank=rank)

    def offer(self, peer: int, hop: int, *, offset: int, nbytes: int, deadline: Deadline) -> None:
        """Lets the peer read bytes [offset, offset + nbytes) of this segment, which must not change until settled.

        `hop` is any number below 2**64 that isn't on offer to this peer already. Waits only while the peer has hundreds
        of records to read.
        """
        self._link(peer).offer(hop, offset=offset, nbytes=nbytes, deadline=deadline)

    def take(self, peer: int, hop: int, *, deadline: Deadline) -> torch.Tensor:
        """Waits for the peer's next offer, which must be this hop; its bytes in the peer's memory, uint8, read only."""
        return self._link(peer).take(hop, deadline=deadline)

    def acknowledge(self, peer: int, hop: int, *, deadline: Deadline) -> None:
        """Tells the peer that this rank won't look at the hop's bytes again."""
        self._link(peer).acknowledge(hop, deadline=deadline)

    def settle(self, peer: int, hop: int, *, deadline: Deadline) -> None:
        """Waits until the peer has acknowledged the hop; returns at once if it isn't on offer."""
        self._link(peer).settle(hop, deadline=deadline)

    def is_settled(self, peer: int, hop: int) -> bool:
        """Whether the peer has acknowledged the hop, without waiting; true if it isn't on offer."""
        return self._link(peer).is_settled(hop)

    @property
    def memories(self) -> dict[int, torch.Tensor]:
        """The segment of each connected peer, uint8, read only."""
        return {peer: link.memory for peer, link in self._links.items()}

    def close(self) -> None:
        """Closes the connections: peers that wait for this rank fail at once. A second call does nothing."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def _link(self, peer: int) -> Link:
        if peer not in self._links:
            raise TransferError(
                self._rank, peer, "transfer", "", "shared memory: not connected to this rank, or closed"
            )
        return self._links[peer]


def _close_in_child() -> None:
    for exchange in list(_open_exchanges):
        exchange.close()


# A forked child holds copies of the sockets, and would keep peers waiting when the rank itself dies. So it closes them.
_open_exchanges: WeakSet[SharedExchange] = WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
