"""The norm of a gradient that many ranks hold in shards and copies, and clipping by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from refit_transport.layout.manifest import Piece


class GradientNorm:
    """The global norm of reduced gradients: each logical element once, however many ranks hold a copy of it.

    `pieces` say which boxes of which logical tensors lie in which of the named parameters. Of the ranks whose
    parameters hold the very same boxes, the lowest counts them: copies over TP, data parallelism, and both ends of a
    pipeline with tied embeddings alike. Elements in no box (vocabulary padding) have no gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], pieces: Sequence[Piece]) -> None:
        """Agrees on who counts what. Collective over all ranks."""
        self._parameters = tuple(parameters.values())
        mine = contents(parameters, pieces)
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(mine.values()))
        first: dict[str, int] = {}
        for rank, digests in enumerate(everyone):
            for digest in digests:
                first.setdefault(digest, rank)
        self._counts = [float(first[mine[name]] == dist.get_rank()) for name in parameters]

    def measure(self) -> torch.Tensor:
        """The norm, a float64 scalar, the same on every rank. Collective over all ranks.

        Every parameter must have its gradient.
        """
        gradients = _gradients(self._parameters)
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double()
        square = (norms.square() * norms.new_tensor(self._counts)).sum()
        dist.all_reduce(square)
        return square.sqrt()

    def clip(self, norm: torch.Tensor, *, largest: float) -> None:
        """Scales the gradients so that a measured `norm` above `largest` becomes that."""
        if norm > largest:
            torch._foreach_mul_(_gradients(self._parameters), float(largest / norm))


def contents(parameters: Iterable[str], pieces: Sequence[Piece]) -> dict[str, str]:
    """A digest of the boxes that each parameter holds, in order: equal for copies, wherever and however they lie."""
    held: dict[str, list[str]] = {name: [] for name in parameters}
    for piece in pieces:
        if piece.buffer in held:
            held[piece.buffer].append(f"{piece.tensor}{piece.box}")
    return {
        name: hashlib.blake2b("\n".join(sorted(boxes)).encode(), digest_size=16).hexdigest()
        for name, boxes in held.items()
    }


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
