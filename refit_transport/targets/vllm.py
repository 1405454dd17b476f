"""A vLLM rank as a refit's target: where its loader puts every checkpoint element, and how its kernels get them.

The manifest comes from vLLM's own `load_weights`, run once on tensors without data. Layers whose kernels compute with
something else than the loaded parameters (`private_layers`) are found by proof at `manifest`, and go through their
own post-load processing in `finish`; all others are written in place. A parameter that the loader computes from what it
has copied (`-exp(A_log)`) is received beside the model, and `finish` lets the loader do its work again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config

from refit_transport.checkpoint import CheckpointFolder
from refit_transport.checksum import Derived
from refit_transport.errors import LayoutError
from refit_transport.layout.manifest import Opaque, RankManifest, TensorSpec
from refit_transport.targets.vllm_composed import ComposedParameters
from refit_transport.targets.vllm_layers import (
    KernelTensors,
    Layer,
    Orphan,
    derived_anew,
    layers_of,
    like,
    on_meta,
    orphans_of,
    place,
    process,
)
from refit_transport.targets.vllm_manifest import LoadedModel, describe, trace_model
from refit_transport.targets.vllm_proof import PrivateLayer, ReadPart, judge, region_of, same_bytes
from refit_transport.targets.vllm_versions import disable_mtp_completeness_check


class VllmTarget:
    """One vLLM rank's weights, as `targets.base.Target`.

    Made in the worker's process after the engine has loaded its weights, and kept as long as the model: what was
    proven about layers at the first `manifest` can't be proven from the checkpoint again once a refit has run.
    """

    def __init__(
        self, model: nn.Module, vllm_config: Any, *, model_config: Any = None, beside: nn.Module | None = None
    ) -> None:
        """
        Args:
            model: the loaded model.
            vllm_config: the engine's.
            model_config: that of the model, where it isn't the engine's own: a drafter's.
            beside: a model whose modules this one may share; what it shares is left to the other's target.
        """
        self._model = model
        self._config = vllm_config
        self._model_config = model_config or vllm_config.model_config
        theirs = frozenset(map(id, beside.modules())) if beside is not None else frozenset()
        self._all_layers = layers_of(model)
        self._layers = tuple(layer for layer in self._all_layers if id(layer.module) not in theirs)
        self._orphans: tuple[Orphan, ...] = ()
        self._loaded: LoadedModel | None = None
        self._private: dict[str, PrivateLayer] | None = None
        self._kernel: dict[str, KernelTensors] = {}
        self._opaque: tuple[Opaque, ...] = ()
        self._composed, self._is_filled = ComposedParameters.of_none(), False

    def private_layers(self) -> Mapping[str, str]:
        """See `targets.base.Target`; known after `manifest`."""
        return {name: f"{layer.remedy}: {layer.reason}" for name, layer in (self._private or {}).items()}

    @property
    def opaque(self) -> tuple[Opaque, ...]:
        """The tensors of the last `manifest` that must arrive whole, and why."""
        return self._opaque

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:
        """See `targets.base.Target`. Call it before the first refit; not during one.

        Raises:
            LayoutError: the loader refuses a tensor, or leaves a part of a parameter unwritten; or the engine has
                loaded MXFP4 weights.
        """
        quantization = self._model_config.quantization or ""
        if "mxfp4" in quantization:
            got = f"{quantization} weights, which refits can't write: start it from a BF16 checkpoint"
            raise LayoutError("", rank, "an engine of BF16 weights", got)
        with self._loading(), on_meta(self._all_layers):
            loaded = trace_model(self._model.load_weights, self._layers, tensors, rank)  # type: ignore[arg-type]
        manifest = describe(loaded, tensors, rank)
        self._composed, self._is_filled = ComposedParameters(loaded, self._layers), False
        if self._private is None:
            with self._loading():
                self._private = self._judge(loaded, rank)
        self._loaded, self._opaque = loaded, manifest.opaque
        return manifest

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`: parameters by qualified name, live or staged."""
        written = {write.region.parameter for write in self._known().writes}
        tensors = {}
        for layer in self._layers:
            for slot in layer.slots:
                live = layer.live(slot)
                if slot.name in written and slot.name not in tensors and live is not None:
                    tensors[slot.name] = live.data
        return tensors | self._composed.received

    def begin(self) -> None:
        """See `targets.base.Target`. After an aborted refit, staged parameters are used again.

        Raises:
            LayoutError: a parameter that is written in place has another form than at `manifest`.
        """
        self._known()
        staged: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            if self._remedy(layer) == "stage":
                self._stage(layer, staged)
            else:
                self._check_form(layer)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `targets.base.Target`: vLLM's own loader, into live or staged parameters."""
        if len(self._layers) < len(self._all_layers):
            # The loader would fill the shared modules too.
            taken = self._known().taken()
            weights = ((name, whole) for name, whole in weights if name in taken)
        with self._loading(), torch.no_grad():
            self._model.load_weights(self._composed.take(weights))  # type: ignore[operator]

    def finish(self) -> None:
        """See `targets.base.Target`: loads composed parameters, processes private layers and what attention derives."""
        dtype = self._model_config.dtype
        with self._loading(), torch.no_grad():
            if self._composed.received:
                self._model.load_weights(self._composed.weights())  # type: ignore[operator]
                self._is_filled = True
            # Attention comes last: it may derive its tensors from another layer's.
            for layer in sorted(self._layers, key=lambda layer: layer.processes_attention):
                remedy = self._remedy(layer)
                if remedy is None and not layer.processes_attention:
                    continue
                kernel = self._kernel.pop(layer.name, None) or KernelTensors.of(layer.module)
                for orphan in self._orphans:
                    if orphan.layer is layer and (parameter := layer.live(orphan.slot)) is not None:
                        orphan.buffer.copy_(parameter.data.view(orphan.buffer.shape))
                process(layer, dtype)
                kernel.settle()

    def served(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`: without the parameters of private layers, and what composed ones are made of."""
        private = {slot.name for layer in self._layers if self._remedy(layer) for slot in layer.slots}
        apart = private | self._composed.received.keys()
        return {name: tensor for name, tensor in self.buffers().items() if name not in apart}

    def derived(self) -> Iterator[Derived]:
        """See `targets.base.Target`: composed parameters, and what attention derives, as MLA's absorbed projections.

        Without what attention derives from a layer whose own layout the engine keeps: it is as unknown as that layer's
        weights. Composed parameters come once something has been received to make them of.
        """
        with self._loading():
            made = self._composed.computed(self._model.load_weights) if self._is_filled else {}  # type: ignore[arg-type]
        for name, recomputed in made.items():
            yield Derived(name, self._composed.live(name), recomputed)
        private = {id(layer.module) for layer in self._layers if self._remedy(layer)}
        for layer in self._layers:
            if not layer.processes_attention or any(id(module) in private for module in layer.module.modules()):
                continue
            with self._loading(), torch.no_grad():
                found = tuple(derived_anew(layer, self._model_config.dtype))
            yield from found

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Where vLLM's loaders and kernels run; a drafter's loader takes any part of the drafter at a time."""
        with set_current_vllm_config(self._config), disable_mtp_completeness_check():
            yield

    def _known(self) -> LoadedModel:
        if self._loaded is None:
            raise LayoutError("", -1, "manifest before any other call", "none")
        return self._loaded

    def _remedy(self, layer: Layer) -> str | None:
        private = (self._private or {}).get(layer.name)
        return None if private is None else private.remedy

    def _stage(self, layer: Layer, staged: dict[str, torch.Tensor]) -> None:
        if layer.name in self._kernel:
            return
        self._kernel[layer.name] = KernelTensors.of(layer.module)
        loaded = self._known().parameters
        device = next((live.device for slot in layer.slots if (live := layer.live(slot)) is not None), None)
        for slot in layer.slots:
            if slot.is_parameter or slot.name in loaded:
                staged.setdefault(slot.name, like(slot.form, device or self._config.device_config.device))
        place(layer, {slot.attribute: staged[slot.name] for slot in layer.slots if slot.name in staged})

    def _check_form(self, layer: Layer) -> None:
        loaded = self._known().parameters
        for slot in layer.slots:
            live = layer.live(slot)
            if slot.name not in loaded:
                continue
            if live is None or (live.shape, live.stride(), live.dtype) != (
                slot.form.shape,
                slot.form.stride(),
                slot.form.dtype,
            ):
                got = "nothing" if live is None else f"{list(live.shape)} {live.dtype} strides {live.stride()}"
                expected = f"{list(slot.form.shape)} {slot.form.dtype} as at manifest"
                raise LayoutError(slot.name, -1, expected, got)

    def _judge(self, loaded: LoadedModel, rank: int) -> dict[str, PrivateLayer]:
        checkpoint = self._checkpoint(loaded)
        differing = self._composed.differing(self._model.load_weights, checkpoint)  # type: ignore[arg-type]
        private: dict[str, PrivateLayer] = {}
        for layer in self._layers:
            names = {slot.name for slot in layer.slots}
            if not names & loaded.parameters:
                continue
            writes = [write for write in loaded.writes if write.region.parameter in names - loaded.composed]
            zeroed = [region for region in loaded.padding if region.parameter in names]
            found = judge(layer, writes, zeroed, checkpoint)
            if found is None and (unlike := names & differing):
                reason = f"{sorted(unlike)[0]} differs from what the loader computes of the checkpoint"
                found = PrivateLayer(layer.name, reason, "stage")
            if found is not None:
                private[layer.name] = found
        self._stage_sharers(private)
        self._orphans = tuple(self._found_orphans(private, loaded, checkpoint, rank))
        self._refuse_unprocessable(private, rank)
        return private

    def _stage_sharers(self, private: dict[str, PrivateLayer]) -> None:
        """A parameter that one layer stages is staged in every layer that shares it."""
        owners = {slot.name: layer for layer in self._layers for slot in layer.slots if self._stages(private, layer)}
        for layer in self._layers:
            sharing = next((owners[slot.name] for slot in layer.slots if slot.name in owners), None)
            if sharing is not None and not self._stages(private, layer):
                reason = f"it shares a parameter with {sharing.name}"
                private[layer.name] = PrivateLayer(layer.name, reason, "stage")

    def _found_orphans(
        self, private: Mapping[str, PrivateLayer], loaded: LoadedModel, checkpoint: ReadPart | None, rank: int
    ) -> Iterator[Orphan]:
        """Of the buffers that may have been views of a staged layer's parameter, those that hold what it loaded."""
        for orphan in orphans_of(self._model, self._layers):
            if not self._stages(private, orphan.layer):
                continue
            if checkpoint is None:
                expected = f"a checkpoint that tells whether it was a view of {orphan.slot.name}"
                raise LayoutError(orphan.name, rank, expected, "none")
            form = orphan.slot.form
            found = torch.zeros(form.shape, dtype=form.dtype, device=orphan.buffer.device)
            for write in loaded.writes:
                part = checkpoint(write) if write.region.parameter == orphan.slot.name else None
                if part is not None:
                    region_of(found, write.region).copy_(part)
            if same_bytes(found, orphan.buffer):
                yield orphan

    @staticmethod
    def _stages(private: Mapping[str, PrivateLayer], layer: Layer) -> bool:
        return layer.name in private and private[layer.name].remedy == "stage"

    def _refuse_unprocessable(self, private: Mapping[str, PrivateLayer], rank: int) -> None:
        """A hook of the whole model may have changed a layer that has no processing of its own to run again."""
        if not hasattr(self._model, "process_weights_after_loading"):
            return
        for layer in self._layers:
            if layer.name in private and layer.quant_method is None and not layer.processes_attention:
                expected = "weights as loaded, or a layer that processes its own"
                raise LayoutError(layer.name, rank, expected, private[layer.name].reason)

    def _checkpoint(self, loaded: LoadedModel) -> ReadPart | None:
        """Reads the checkpoint that the engine loaded; None when it loaded none that can be read here."""
        folder = Path(self._model_config.model)
        if self._config.load_config.load_format == "dummy" or not folder.is_dir():
            return None
        try:
            checkpoint = CheckpointFolder(folder)
        except FileNotFoundError:
            return None
        return lambda write: checkpoint.read_part(loaded.entries[write.source], write.box)
