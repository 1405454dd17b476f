"""Transports that deliver wrong weights without an error: what a job's own check has to find."""

import torch

from refit_transport.fabrics.base import Spent
from refit_transport.transports.nccl_reshard import NcclReshard


class Idle(NcclReshard):
    """Delivers nothing: the engines keep what they loaded."""

    def run(self, endpoint, fabric, *, deadline):
        return Spent()


class WithoutExperts(NcclReshard):
    """The experts stay as they were."""

    def run(self, endpoint, fabric, *, deadline):
        kept = [(view, view.clone()) for view in views(endpoint, "experts.")]
        spent = super().run(endpoint, fabric, deadline=deadline)
        for view, before in kept:
            view.copy_(before)
        return spent


class SwappedExpert(NcclReshard):
    """One expert's gate and up projections are exchanged."""

    def run(self, endpoint, fabric, *, deadline):
        spent = super().run(endpoint, fabric, deadline=deadline)
        gates, ups = (views(endpoint, f"layers.0.mlp.experts.{name}_proj.weight") for name in ("gate", "up"))
        for gate, up in zip(gates[:1], ups[:1], strict=True):
            first = gate[0].clone()
            gate[0].copy_(up[0])
            up[0].copy_(first)
        return spent


def views(endpoint, part):
    binding = endpoint.target_binding()
    if binding is None:
        return list[torch.Tensor]()
    pieces = binding.manifest.pieces
    return [binding.view(index) for index, piece in enumerate(pieces) if part in piece.tensor]
