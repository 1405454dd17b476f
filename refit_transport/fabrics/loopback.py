"""All ranks in one process and one thread: the reference that other fabrics are compared with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from refit_transport.errors import TransferError
from refit_transport.fabrics.program import Program, Step


def run_all(programs: Iterable[Program]) -> None:
    """Executes the programs of all ranks, payload by payload.

    Raises:
        TransferError: a hop whose two ends aren't both there, or that differ in size.
    """
    ranks: dict[int, dict[int, list[Step]]] = {}
    for program in programs:
        for step in program.steps:
            ranks.setdefault(step.payload, {}).setdefault(program.rank, []).append(step)
    for payload in sorted(ranks):
        sent: dict[int, torch.Tensor] = {}
        for rank, step in _in_turn(ranks[payload]):
            if step.incoming is not None:
                if step.incoming.hop not in sent:
                    raise _failure(rank, step, f"nobody sends hop {step.incoming.hop}")
                arrived = sent.pop(step.incoming.hop)
                if arrived.numel() != step.memory.numel():
                    raise _failure(rank, step, f"has {step.memory.numel()} bytes and gets {arrived.numel()}")
                step.memory.copy_(arrived)
            step.pack.make()
            sent |= {send.hop: step.memory for send in step.sends}
            step.unpack.make()
            if step.then is not None:
                step.then()
        if sent:
            raise TransferError(-1, -1, "transfer", "", f"nobody receives hop {min(sent)}")


def _in_turn(steps: dict[int, list[Step]]) -> list[tuple[int, Step]]:
    """Senders before receivers: by the number of the hop that brings the payload, roots first."""
    pairs = [(rank, step) for rank, members in steps.items() for step in members]
    return sorted(pairs, key=lambda pair: -1 if pair[1].incoming is None else pair[1].incoming.hop)


def _failure(rank: int, step: Step, reason: str) -> TransferError:
    peer = -1 if step.incoming is None else step.incoming.peer
    return TransferError(rank, peer, "transfer", step.tensor, f"payload {step.payload} {reason}")
