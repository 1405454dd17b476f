"""Shard-to-shard weight refit from training ranks to generation ranks.

What most users need is here by name; each is imported when it is first asked for, so that importing the package, or
planning with it, brings in neither torch nor any engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refit_transport.config.settings import RefitSettings
    from refit_transport.errors import (
        AgreementError,
        DeadlineError,
        LayoutError,
        PlanError,
        RefitTransportError,
        TransferError,
        VerificationError,
        VersionError,
    )
    from refit_transport.fabrics.rendezvous import ControlChannel
    from refit_transport.layout.box import Box, Span
    from refit_transport.layout.layout import Layout, manifest_from_layouts
    from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
    from refit_transport.layout.mesh import Mesh
    from refit_transport.layout.placement import BlockShard, Partial, Replicate, Shard, StridedShard
    from refit_transport.planning.plan import TransferPlan
    from refit_transport.planning.planner import plan_transfer
    from refit_transport.report import RefitReport
    from refit_transport.resharding import Resharder, reshard
    from refit_transport.scheduling.bound import Bound, bound
    from refit_transport.scheduling.makespan import Makespan, simulate
    from refit_transport.scheduling.schedule import Schedule, Traffic
    from refit_transport.scheduling.scheduler import build_schedule
    from refit_transport.scheduling.topology import Nic, Topology
    from refit_transport.session import RefitSession
    from refit_transport.sources.dtensor import layout_of, source_of
    from refit_transport.sources.tensors import Local
    from refit_transport.targets.module import DescribedTarget

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BlockShard",
    "Bound",
    "Box",
    "ControlChannel",
    "DeadlineError",
    "DescribedTarget",
    "Layout",
    "LayoutError",
    "Local",
    "Makespan",
    "Manifest",
    "Mesh",
    "Nic",
    "Partial",
    "Piece",
    "PlanError",
    "RankManifest",
    "RefitReport",
    "RefitSession",
    "RefitSettings",
    "RefitTransportError",
    "Replicate",
    "Resharder",
    "Schedule",
    "Shard",
    "Span",
    "StridedShard",
    "TensorSpec",
    "Topology",
    "Traffic",
    "TransferError",
    "TransferPlan",
    "VerificationError",
    "VersionError",
    "bound",
    "build_schedule",
    "layout_of",
    "manifest_from_layouts",
    "plan_transfer",
    "reshard",
    "simulate",
    "source_of",
]

# Where each name lives, below this package; the same as the imports above, which only type checkers follow.
_NAMES_BY_MODULE = {
    "config.settings": ("RefitSettings",),
    "errors": (
        "AgreementError",
        "DeadlineError",
        "LayoutError",
        "PlanError",
        "RefitTransportError",
        "TransferError",
        "VerificationError",
        "VersionError",
    ),
    "fabrics.rendezvous": ("ControlChannel",),
    "layout.box": ("Box", "Span"),
    "layout.layout": ("Layout", "manifest_from_layouts"),
    "layout.manifest": ("Manifest", "Piece", "RankManifest", "TensorSpec"),
    "layout.mesh": ("Mesh",),
    "layout.placement": ("BlockShard", "Partial", "Replicate", "Shard", "StridedShard"),
    "planning.plan": ("TransferPlan",),
    "planning.planner": ("plan_transfer",),
    "report": ("RefitReport",),
    "resharding": ("Resharder", "reshard"),
    "scheduling.bound": ("Bound", "bound"),
    "scheduling.makespan": ("Makespan", "simulate"),
    "scheduling.schedule": ("Schedule", "Traffic"),
    "scheduling.scheduler": ("build_schedule",),
    "scheduling.topology": ("Nic", "Topology"),
    "session": ("RefitSession",),
    "sources.dtensor": ("layout_of", "source_of"),
    "sources.tensors": ("Local",),
    "targets.module": ("DescribedTarget",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
