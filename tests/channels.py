"""The control channel of ranks that know each other's port before they start."""

from __future__ import annotations

from refit_transport.fabrics.rendezvous import ControlChannel, Meeting

HOST, SECRET = "127.0.0.1", "of the tests"


def open_channel(rank: int, *, world_size: int, port: int, timeout_s: float = 60.0) -> ControlChannel:
    """Rank 0 listens on `port`, the others join it there."""
    if rank == 0:
        return ControlChannel.listen(host=HOST, port=port, world_size=world_size, timeout_s=timeout_s, secret=SECRET)
    return ControlChannel.join(Meeting(HOST, port, SECRET), rank=rank, world_size=world_size, timeout_s=timeout_s)
