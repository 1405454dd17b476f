"""The protocol of a refit's source side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from refit_transport.layout.manifest import RankManifest


class Source(Protocol):
    """One training rank's weights. Called in the training process; no method is collective."""

    def manifest(self, rank: int) -> RankManifest:
        """Describes what this process holds, as refit rank `rank`, role "source"."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that the manifest's pieces point into, by buffer name.

        Read again before each refit, so a source may rebind its storage between refits.
        """
