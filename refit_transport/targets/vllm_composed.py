"""Parameters that a loader computes from what it has copied into them, such as `A = -exp(A_log)`.

A refit receives this rank's part of the checkpoint's values in tensors of their own. Then the model's own loader runs
again, on whole tensors that hold the received values where the loader reads and zeros elsewhere: the very code that
made the parameter at the first load makes it anew, so nothing has to be known about the computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from refit_transport.errors import LayoutError
from refit_transport.targets.loader_trace import Write
from refit_transport.targets.vllm_layers import Layer, Slot
from refit_transport.targets.vllm_manifest import Load, LoadedModel
from refit_transport.targets.vllm_proof import ReadPart, region_of, same_bytes


class ComposedParameters:
    """The composed parameters of one traced rank; `received` are the tensors that refits write, by parameter."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[Layer]) -> None:
        """Allocates the tensors: as large as the parameters, in load format."""
        self._live = {
            slot.name: (layer, slot) for layer in layers for slot in layer.slots if slot.name in loaded.composed
        }
        self._writes: defaultdict[str, list[Write]] = defaultdict(list)
        for write in loaded.writes:
            if write.region.parameter in loaded.composed:
                self._writes[write.source].append(write)
        self._shapes = {name: loaded.entries[name].shape for name in self._writes}
        self.received = {
            name: torch.zeros(slot.form.shape, dtype=slot.form.dtype, device=_tensor(layer, slot).device)
            for name, (layer, slot) in self._live.items()
        }

    @classmethod
    def of_none(cls) -> ComposedParameters:
        """Of a model that isn't traced yet."""
        return cls(LoadedModel({}, (), (), {}, frozenset(), {}, frozenset()), ())

    def live(self, name: str) -> torch.Tensor:
        """A composed parameter as it is served."""
        return _tensor(*self._live[name]).data

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Keeps this rank's part of the tensors that composed parameters need, and passes the others on."""
        for name, whole in weights:
            if name not in self._writes:
                yield name, whole
            for write in self._writes.get(name, ()):
                self._part(write).copy_(whole[_index(write)])

    def weights(self, *, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint tensors for the loader, in the order of the first load, right where this rank's loader reads.

        Those of the parameters `without` are left out.
        """
        for name, writes in self._writes.items():
            if writes[0].region.parameter in without:
                continue
            first = self._part(writes[0])
            whole = torch.zeros(self._shapes[name], dtype=first.dtype, device=first.device)
            for write in writes:
                whole[_index(write)].copy_(self._part(write))
            yield name, whole

    @torch.no_grad()
    def differing(self, load: Load, checkpoint: ReadPart | None) -> frozenset[str]:
        """The parameters that loading the checkpoint again would change; none without a checkpoint to ask.

        Afterwards every live parameter is as before.
        """
        if checkpoint is None or not self._writes:
            return frozenset()
        unlike = {name for name, (layer, slot) in self._live.items() if not _in_load_format(layer, slot)}
        for write in (write for writes in self._writes.values() for write in writes):
            part = checkpoint(write)
            if part is None:
                unlike.add(write.region.parameter)
            else:
                self._part(write).copy_(part)
        live = {name: _tensor(*place).data for name, place in self._live.items() if name not in unlike}
        computed = self.computed(load, without=unlike) if live else {}
        return frozenset(unlike | {name for name, tensor in live.items() if not same_bytes(tensor, computed[name])})

    @torch.no_grad()
    def computed(self, load: Load, *, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """What the loader makes of the received values, by parameter; every live one is as before afterwards."""
        live = {name: _tensor(*place).data for name, place in self._live.items() if name not in without}
        saved = {name: tensor.clone() for name, tensor in live.items()}
        try:
            load(self.weights(without=without))
            return {name: tensor.clone() for name, tensor in live.items()}
        finally:
            for name, tensor in saved.items():
                live[name].copy_(tensor)

    def _part(self, write: Write) -> torch.Tensor:
        return region_of(self.received[write.region.parameter], write.region)


def _index(write: Write) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.stop) for span in write.box.spans)


def _tensor(layer: Layer, slot: Slot) -> torch.Tensor:
    live = layer.live(slot)
    if live is None:
        raise LayoutError(slot.name, -1, "a parameter that the loader can fill", "nothing")
    return live


def _in_load_format(layer: Layer, slot: Slot) -> bool:
    live = layer.live(slot)
    form = (slot.form.shape, slot.form.stride(), slot.form.dtype)
    return live is not None and (live.shape, live.stride(), live.dtype) == form
