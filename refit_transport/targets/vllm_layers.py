"""A vLLM model's layers in load format: what its loader fills, before any post-load processing.

vLLM records the format of every layer when it builds the model (it needs it for its own reload); processing after the
load may then pack, pad, cast or drop the parameters. This module puts layers into load format, without data or with,
and back, and runs a layer's own processing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from refit_transport.checksum import Derived
from refit_transport.targets.vllm_versions import SKIP_LOAD_TENSORS, SKIP_TENSORS, is_deferred_attention_layer

# vLLM lists the router's correction bias as never loaded because its reload keeps it in place; loaders do fill it.
_NEVER_LOADED = SKIP_LOAD_TENSORS - {"e_score_correction_bias"}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module keeps one parameter or buffer. `name` is qualified; an alias has its first owner's name."""

    name: str
    attribute: str
    is_parameter: bool
    form: torch.Tensor
    """The tensor in load format, on the meta device, with vLLM's loader attributes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module with the load format of its own parameters and buffers; an attention layer may have none."""

    name: str
    module: nn.Module
    slots: tuple[Slot, ...]

    def live(self, slot: Slot) -> torch.Tensor | None:
        """The tensor that is in the slot now; None when processing removed it."""
        return (self.module._parameters if slot.is_parameter else self.module._buffers).get(slot.attribute)

    @property
    def quant_method(self) -> Any:
        """The object that processes this layer's weights after a load, or None."""
        method = getattr(self.module, "quant_method", None)
        return method if isinstance(method, QuantizeMethodBase) else None

    @property
    def processes_attention(self) -> bool:
        return bool(is_deferred_attention_layer(self.module))


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """Every module that owns tensors or derives some from others, with their load format; tied ones share it."""
    forms: dict[int, tuple[str, torch.Tensor]] = {}
    layers = []
    for name, module in model.named_modules():
        slots = []
        for attribute, recorded, is_parameter in _recorded(module):
            live = (module._parameters if is_parameter else module._buffers).get(attribute)
            qualified = f"{name}.{attribute}" if name else attribute
            entry = (qualified, _form(recorded, module))
            if live is not None:
                entry = forms.setdefault(id(live), entry)
            slots.append(Slot(entry[0], attribute, is_parameter, entry[1]))
        if slots or is_deferred_attention_layer(module):
            layers.append(Layer(name, module, tuple(slots)))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A buffer that may have been another view of a parameter, as Mamba's `conv_weights`, before that was processed.

    If it was, it keeps the loaded values by itself, and must follow the parameter's in load format.
    """

    name: str
    buffer: torch.Tensor
    layer: Layer
    slot: Slot


def orphans_of(model: nn.Module, layers: tuple[Layer, ...]) -> Iterator[Orphan]:
    """The buffers that vLLM doesn't record because they were views, each with every parameter that it could be of."""
    for path, module in model.named_modules():
        info = LAYERWISE_INFO.get(module)
        recorded = SKIP_TENSORS if info is None else SKIP_TENSORS | info.restore_metadata[1].keys()
        inside = [layer for layer in layers if layer.name == path or layer.name.startswith(f"{path}.")]
        for attribute in sorted(module._non_persistent_buffers_set - recorded):
            buffer = module._buffers[attribute]
            if buffer is None or info is None or any(_shares(buffer, layer) for layer in inside):
                continue
            for layer in inside:
                for slot in layer.slots:
                    if slot.is_parameter and (slot.form.numel(), slot.form.dtype) == (buffer.numel(), buffer.dtype):
                        yield Orphan(f"{path}.{attribute}", buffer, layer, slot)


def _shares(buffer: torch.Tensor, layer: Layer) -> bool:
    live = (tensor for tensor in layer.module._parameters.values() if tensor is not None)
    return any(tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata for tensor in live)


def _recorded(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Attribute, tensor and whether it is a parameter, for all that is part of the module's load format.

    What vLLM doesn't record (a bias, a correction bias, anything in a module it doesn't know) is taken as it is now.
    """
    info = LAYERWISE_INFO.get(module)
    parameters, buffers = info.restore_metadata if info is not None else ({}, {})
    for recorded, live, is_parameter in ((parameters, module._parameters, True), (buffers, module._buffers, False)):
        for attribute, tensor in recorded.items():
            if attribute not in _NEVER_LOADED:
                yield attribute, tensor, is_parameter
        for attribute, tensor in live.items():
            unrecorded = info is None or attribute in SKIP_TENSORS
            if tensor is not None and unrecorded and attribute not in recorded and attribute not in _NEVER_LOADED:
                yield attribute, _as_loaded(attribute, tensor, module), is_parameter


def _as_loaded(attribute: str, tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A tensor that vLLM didn't record, as it was before processing; that casts the bias of some linear layers."""
    dtype = getattr(module, "params_dtype", tensor.dtype) if attribute == "bias" else tensor.dtype
    form = tensor.data.to(device="meta", dtype=dtype)
    form.__class__ = tensor.__class__
    form.__dict__ = tensor.__dict__.copy()
    return form


def _form(recorded: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """A meta tensor of our own: vLLM's record must stay free of references to the module."""
    return restore_layer_refs(like(recorded, torch.device("meta")), module)  # type: ignore[no-any-return]


def like(form: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of zeros with a form's shape, strides, dtype, class and loader attributes.

    Zeros, so that what the loader never writes (padding) is zero and not left over from other tensors.
    """
    tensor = torch.empty_strided(tuple(form.shape), form.stride(), dtype=form.dtype, device=device)
    if device.type != "meta":
        tensor.zero_()
    tensor.__class__ = form.__class__
    tensor.__dict__ = form.__dict__.copy()
    return tensor


@contextmanager
def on_meta(layers: tuple[Layer, ...]) -> Iterator[None]:
    """Inside, the layers are in load format without data; afterwards they are exactly as before."""
    saved = [(layer.module, dict(layer.module._parameters), dict(layer.module._buffers)) for layer in layers]
    try:
        for layer in layers:
            place(layer, {slot.attribute: slot.form for slot in layer.slots})
        yield
    finally:
        for module, parameters, buffers in saved:
            _replace(module._parameters, parameters)
            _replace(module._buffers, buffers)


def place(layer: Layer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Puts tensors into a layer's slots, and takes out the parameters that only exist after processing."""
    parameters, buffers = layer.module._parameters, layer.module._buffers
    formed = {slot.attribute for slot in layer.slots}
    for attribute in [name for name in parameters if name not in formed | _NEVER_LOADED]:
        if parameters[attribute] is not None:
            del parameters[attribute]
    for slot in layer.slots:
        if slot.attribute in tensors:
            owner: dict[str, Any] = parameters if slot.is_parameter else buffers
            owner[slot.attribute] = tensors[slot.attribute]


def _replace(current: dict[str, Any], saved: dict[str, Any]) -> None:
    current.clear()
    current.update(saved)


@dataclass(frozen=True, slots=True)
class KernelTensors:
    """The tensors that a layer computes with, by who holds them: its parameters, its buffers, the attributes of it and
    of its attention's implementation.
    """

    held: tuple[tuple[dict[str, Any], Mapping[str, torch.Tensor]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> KernelTensors:
        """Those that the module has now."""
        implementation = getattr(vars(module).get("impl"), "__dict__", {})
        owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module), implementation)
        return cls(
            tuple(
                (owner, {name: value for name, value in owner.items() if isinstance(value, torch.Tensor)})
                for owner in owners
            )
        )

    def settle(self) -> None:
        """Moves freshly processed values into these tensors' storage and puts them back where they were.

        Captured graphs and other holders of addresses stay right. A tensor whose shape, strides or dtype changed
        can't keep its address; the new one stays.
        """
        for owner, name, old, new in self._replaced():
            if (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device):
                old.data.copy_(new.data)
                owner[name] = old

    def put_back(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Undoes what has replaced these tensors since; returns the name of each, itself and its replacement."""
        found = [(name, old, new) for _, name, old, new in self._replaced()]
        for owner, held in self.held:
            owner.update(held)
        return found

    def _replaced(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
        for owner, held in self.held:
            for name, old in held.items():
                new = owner.get(name)
                if isinstance(new, torch.Tensor) and new is not old:
                    yield owner, name, old, new


def derived_anew(layer: Layer, dtype: torch.dtype) -> Iterator[Derived]:
    """What an attention layer has derived from weights, and what its processing makes of these weights now.

    Afterwards the layer is as before. Scalars are left out: they are scales of caches and come from no weight.
    """
    parameters, formed = layer.module._parameters, {slot.attribute for slot in layer.slots}
    before = KernelTensors.of(layer.module)
    try:
        # What exists beforehand would be overwritten in place.
        for name in [name for name in parameters if name not in formed and parameters[name] is not None]:
            del parameters[name]
        layer.module.process_weights_after_loading(dtype)  # type: ignore[operator]
    finally:
        made = before.put_back()
    for name, served, recomputed in made:
        if served.dim() > 0:
            yield Derived(f"{layer.name}.{name}", served.data, recomputed.data)


def process(layer: Layer, dtype: torch.dtype) -> None:
    """Runs a layer's own post-load processing as after a first load; `dtype` is the model's."""
    method = layer.quant_method
    if method is not None:
        vars(layer.module).pop("_already_called_process_weights_after_loading", None)
        if getattr(method, "moe_kernel", None) is not None:
            # With a kernel at hand, vLLM 0.32 takes this for an update and skips the packing of a first load.
            method.moe_kernel = None
        method.process_weights_after_loading(layer.module)
        if hasattr(layer.module, "update_param_tp_status"):
            layer.module.update_param_tp_status()  # type: ignore[operator]
    if layer.processes_attention:
        layer.module.process_weights_after_loading(dtype)  # type: ignore[operator]
