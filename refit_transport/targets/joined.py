"""A model and the drafter beside it as one target: a refit delivers to both, or to neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from refit_transport.checksum import Derived
from refit_transport.errors import LayoutError
from refit_transport.layout.manifest import RankManifest, TensorSpec
from refit_transport.targets.base import Target

_DRAFTER = "drafter."
_Held = TypeVar("_Held")


class JoinedTarget:
    """Implements `targets.base.Target`; whatever the drafter names has the prefix `drafter.` here."""

    def __init__(self, model: Target, drafter: Target) -> None:
        self._model, self._drafter = model, drafter

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:
        """See `targets.base.Target`. A tensor that both take is received by each.

        Raises:
            LayoutError: an element of one of them would be filled by none of the tensors, or they keep a tensor in
                different dtypes.
        """
        model, drafter = self._model.manifest(rank, tensors), self._drafter.manifest(rank, tensors)
        specs = {spec.name: spec for spec in model.tensors}
        for spec in drafter.tensors:
            if specs.setdefault(spec.name, spec) != spec:
                raise LayoutError(spec.name, rank, f"{specs[spec.name].dtype}, as in the model", spec.dtype)
        renamed = (replace(piece, buffer=f"{_DRAFTER}{piece.buffer}") for piece in drafter.pieces)
        opaque = {each.tensor: each for each in (*drafter.opaque, *model.opaque)}
        ordered = tuple(specs[spec.name] for spec in tensors if spec.name in specs)
        return RankManifest(rank, "target", ordered, (*model.pieces, *renamed), tuple(opaque.values()))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`."""
        return _joined(self._model.buffers(), self._drafter.buffers())

    def private_layers(self) -> Mapping[str, str]:
        """See `targets.base.Target`."""
        return _joined(self._model.private_layers(), self._drafter.private_layers())

    def begin(self) -> None:
        """See `targets.base.Target`."""
        self._model.begin()
        self._drafter.begin()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `targets.base.Target`."""
        whole = tuple(weights)
        self._model.load(whole)
        self._drafter.load(whole)

    def finish(self) -> None:
        """See `targets.base.Target`."""
        self._model.finish()
        self._drafter.finish()

    def served(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`."""
        return _joined(self._model.served(), self._drafter.served())

    def derived(self) -> Iterator[Derived]:
        """See `targets.base.Target`."""
        yield from self._model.derived()
        for each in self._drafter.derived():
            yield replace(each, name=f"{_DRAFTER}{each.name}")


def _joined(model: Mapping[str, _Held], drafter: Mapping[str, _Held]) -> dict[str, _Held]:
    return {**model, **{f"{_DRAFTER}{name}": held for name, held in drafter.items()}}
