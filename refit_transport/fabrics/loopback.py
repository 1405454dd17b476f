"""All ranks in one process and one thread: the reference that other fabrics are compared with."""

from __future__ import annotations

from collections.abc import Iterable

from refit_transport.errors import TransferError
from refit_transport.fabrics.program import Operation, Program


def run_all(programs: Iterable[Program]) -> None:
    """Executes the programs of all ranks, message by message.

    Raises:
        TransferError: a message whose two ends aren't both there, or that differ in size.
    """
    ends: dict[int, list[tuple[int, Operation]]] = {}
    for program in programs:
        for operation in program.operations:
            ends.setdefault(operation.message, []).append((program.rank, operation))
    for message in sorted(ends):
        by_kind = {operation.kind: (rank, operation) for rank, operation in ends[message]}
        if "copy" in by_kind:
            for move in by_kind["copy"][1].moves:
                move.live.copy_(move.wire)
            continue
        rank = ends[message][0][0]
        if by_kind.keys() != {"send", "receive"}:
            raise TransferError(rank, ends[message][0][1].peer, "transfer", "", f"message {message} has one end only")
        (_, send), (_, receive) = by_kind["send"], by_kind["receive"]
        if send.payload.numel() != receive.payload.numel():
            sizes = f"{send.payload.numel()} and {receive.payload.numel()} bytes"
            raise TransferError(rank, send.peer, "transfer", send.tensor, f"the ends of message {message} have {sizes}")
        for move in send.moves:
            move.wire.copy_(move.live)
        receive.payload.copy_(send.payload)
        for move in receive.moves:
            move.live.copy_(move.wire)
