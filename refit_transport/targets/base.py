"""The protocol of a refit's target side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from refit_transport.checksum import Derived
    from refit_transport.layout.manifest import RankManifest, TensorSpec


class Target(Protocol):
    """One generation rank's weights. Called in the generation process.

    Order: `manifest` once; then for each refit `begin`, any number of `load` calls and of writes into `buffers()`,
    `finish`.
    """

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:
        """Describes which boxes of the source's `tensors` this process needs, as refit rank `rank`, role "target".

        `tensors` carry the source's dtypes; the returned specs carry this side's. A tensor that this side can't
        describe as strided views is listed in `opaque` with the reason and arrives whole through `load`.

        Raises:
            LayoutError: an element of this rank's weights would be filled by none of the tensors.
        """

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the manifest's pieces point into, by buffer name; valid between `begin` and `finish`.

        The same names at each refit; the storage may differ.
        """

    def private_layers(self) -> Mapping[str, str]:
        """Layers whose own layout the engine keeps, and why: they are staged, and processed in `finish`."""

    def begin(self) -> None:
        """Opens a refit: afterwards the buffers can be written."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads whole checkpoint tensors (checkpoint names, per expert) through this side's own loader."""

    def finish(self) -> None:
        """Closes a refit: afterwards this side serves what was written."""

    def served(self) -> Mapping[str, torch.Tensor]:
        """Those `buffers` that are served as the manifest describes them; valid at any time after `finish`.

        It lacks the buffers of layers whose own layout the engine keeps. Before the first refit it is valid too.
        """

    def derived(self) -> Iterator[Derived]:
        """What this side has derived from its weights, one after the other, to be compared; none is fine."""
