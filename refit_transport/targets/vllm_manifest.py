"""A rank's manifest from the trace of its loader: pieces, tensors that must arrive whole, and the proof of no gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import CheckpointEntry, checkpoint_entries
from refit_transport.layout.manifest import Opaque, Piece, RankManifest, TensorSpec
from refit_transport.layout.pieces import merge_pieces, split_last
from refit_transport.targets.coverage import missing, overlaps
from refit_transport.targets.loader_trace import LoaderFailure, RawTrace, Region, Write, trace
from refit_transport.targets.vllm_layers import Layer

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a rank's loader does with the tensors of a source.

    `writes` are plain copies of checkpoint tensors, `padding` the regions set to zero, `opaque` maps logical tensors to
    the reason why they must arrive whole. `parameters` are all names written in one way or another; `dtypes` are
    theirs. `composed` are the parameters that the loader fills with plain copies and then computes anew from these
    alone, such as `-exp(A_log)`: their writes say which elements of the checkpoint the computation needs.
    """

    entries: Mapping[str, CheckpointEntry]
    writes: tuple[Write, ...]
    padding: tuple[Region, ...]
    opaque: Mapping[str, str]
    parameters: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    composed: frozenset[str]

    def taken(self) -> frozenset[str]:
        """The checkpoint tensors that the loader makes something of."""
        whole = (name for name, entry in self.entries.items() if entry.tensor in self.opaque)
        return frozenset((*(write.source for write in self.writes), *whole))


def trace_model(load: Load, layers: Sequence[Layer], tensors: Sequence[TensorSpec], rank: int) -> LoadedModel:
    """Runs the loader over checkpoint tensors without data; the layers must be on the meta device.

    Raises:
        LayoutError: the loader refuses a tensor, or leaves a part of a parameter unwritten.
    """
    entries = {entry.name: entry for spec in tensors for entry in checkpoint_entries(spec)}
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in tensors}
    forms = {slot.name: slot.form for layer in layers for slot in layer.slots}
    raw, looked_at = _trace_all(load, entries, dtypes, forms, rank)
    _refuse_rebound(layers, rank)
    composed = _composed_parameters(raw, forms, looked_at)
    while True:
        reasons = _opaque_entries(raw, forms, looked_at, composed)
        opaque = _mixed_dtypes(raw.writes, entries, forms)
        opaque |= {entries[name].tensor: reason for name, reason in reversed(reasons.items())}
        # The loader can't compute anew what it needs a whole tensor for: all that it needs then arrives whole.
        incomplete = {
            write.region.parameter for write in raw.writes if entries[write.source].tensor in opaque
        } & composed
        if not incomplete:
            break
        composed -= incomplete
    _check_complete(raw, layers, rank)
    writes = tuple(write for write in raw.writes if entries[write.source].tensor not in opaque)
    written = {write.region.parameter for write in raw.writes}
    written |= {computed.region.parameter for computed in raw.computed}
    form_dtypes = {name: form.dtype for name, form in forms.items()}
    return LoadedModel(entries, writes, raw.zeroed, opaque, frozenset(written), form_dtypes, composed)


def _trace_all(
    load: Load,
    entries: Mapping[str, CheckpointEntry],
    dtypes: Mapping[str, torch.dtype],
    forms: Mapping[str, torch.Tensor],
    rank: int,
) -> tuple[RawTrace, dict[str, str]]:
    """The trace, and the entries whose values the loader looks at; these are traced as zeros."""
    looked_at: dict[str, str] = {}
    # Loaders group by module while they read; names sorted by their parts keep modules together.
    ordered = sorted(entries, key=lambda name: name.split("."))
    while True:
        sources = {
            name: torch.zeros(
                entries[name].shape,
                dtype=dtypes[entries[name].tensor],
                device="cpu" if name in looked_at else "meta",
            )
            for name in ordered
        }
        try:
            return trace(load, sources, forms), looked_at
        except LoaderFailure as failure:
            fresh = failure.sources - looked_at.keys()
            if not fresh:
                tensor = entries.get(failure.source)
                shape = "" if tensor is None else f" {list(tensor.shape)}"
                cause = failure.__cause__
                got = f"{type(cause).__name__}: {cause}"
                raise LayoutError(failure.source, rank, f"a tensor{shape} that vLLM's loader takes", got) from cause
            looked_at |= dict.fromkeys(fresh, f"its loader looks at its values ({failure.operation})")


def _refuse_rebound(layers: Sequence[Layer], rank: int) -> None:
    for layer in layers:
        for slot in layer.slots:
            if layer.live(slot) is not slot.form:
                raise LayoutError(slot.name, rank, "a parameter that the loader fills in place", "a replaced one")


def _composed_parameters(
    raw: RawTrace, forms: Mapping[str, torch.Tensor], looked_at: Mapping[str, str]
) -> frozenset[str]:
    """The parameters that the loader computes from what it has copied into them, and from nothing else.

    Loading tensors that are right where the traced writes read them then fills these parameters rightly, and touches
    no other one.
    """
    reads: defaultdict[str, set[str]] = defaultdict(set)
    writers: defaultdict[str, set[str]] = defaultdict(set)
    for write in raw.writes:
        reads[write.region.parameter].add(write.source)
        writers[write.source].add(write.region.parameter)
    found = {each.region.parameter for each in raw.computed}
    for computed in raw.computed:
        if computed.sources or computed.parameters != {computed.region.parameter}:
            found -= {computed.region.parameter, *computed.parameters}
    return frozenset(
        name
        for name in found
        if forms[name].is_contiguous()
        and not any(source in looked_at or writers[source] != {name} for source in reads[name])
    )


def _opaque_entries(
    raw: RawTrace, forms: Mapping[str, torch.Tensor], looked_at: Mapping[str, str], composed: frozenset[str]
) -> dict[str, str]:
    """The checkpoint tensors whose load is more than plain copies, each element once, and why."""
    reasons = dict(looked_at)
    by_parameter: defaultdict[str, list[Write]] = defaultdict(list)
    for write in raw.writes:
        by_parameter[write.region.parameter].append(write)
    for computed in raw.computed:
        if computed.region.parameter in composed:
            continue
        involved = set(computed.sources)
        for parameter in computed.parameters:
            involved |= {write.source for write in by_parameter[parameter]}
        overwritten = computed.region.parameter
        involved |= {
            write.source
            for write in by_parameter[overwritten]
            if overlaps(tuple(forms[overwritten].shape), [write.region, computed.region])
        }
        for source in sorted(involved):
            reasons.setdefault(source, computed.reason)
    for parameter, writes in by_parameter.items():
        shape = tuple(forms[parameter].shape)
        if not forms[parameter].is_contiguous():
            reasons = {write.source: f"{parameter} isn't contiguous" for write in writes} | reasons
            continue
        for pair in overlaps(shape, [write.region for write in writes]):
            for write in (writes[pair.first], writes[pair.second]):
                reasons.setdefault(write.source, f"its part of {parameter} overlaps another one")
        for region in (region for region in raw.zeroed if region.parameter == parameter):
            for write in writes:
                if write.region.order < region.order and overlaps(shape, [write.region, region]):
                    reasons.setdefault(write.source, f"its loader zeroes a part of {parameter} after writing it")
    return reasons


def _mixed_dtypes(
    writes: Iterable[Write], entries: Mapping[str, CheckpointEntry], forms: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    found: defaultdict[str, set[torch.dtype]] = defaultdict(set)
    for write in writes:
        found[entries[write.source].tensor].add(forms[write.region.parameter].dtype)
    return {
        tensor: f"it is loaded as {' and '.join(sorted(map(str, dtypes)))}"
        for tensor, dtypes in found.items()
        if len(dtypes) > 1
    }


def _check_complete(raw: RawTrace, layers: Sequence[Layer], rank: int) -> None:
    """Every element of every parameter must be loaded, zeroed by the loader, or declared as padding by vLLM."""
    regions: defaultdict[str, list[Region]] = defaultdict(list)
    for region in (
        *(write.region for write in raw.writes),
        *(each.region for each in raw.computed if each.sources or each.parameters - {each.region.parameter}),
        *raw.zeroed,
    ):
        if region.view.numel:
            regions[region.parameter].append(region)
    for layer in layers:
        for slot in layer.slots:
            if not slot.is_parameter and slot.name not in regions:
                continue
            padding = slot.form.numel() - int(getattr(slot.form, "weight_loader_numel", slot.form.numel()))
            absent = missing(tuple(slot.form.shape), regions[slot.name])
            if absent > padding:
                got = f"{absent} of {slot.form.numel()} elements that no tensor of the source fills"
                raise LayoutError(slot.name, rank, "every element loaded", got)


def describe(loaded: LoadedModel, tensors: Sequence[TensorSpec], rank: int) -> RankManifest:
    """The manifest of the traced rank. Returned specs carry the parameters' dtype; opaque ones the source's.

    What the loader copies in parts, such as expert by expert, is one piece where the parameter holds it at one stride.
    """
    dtypes: dict[str, str] = {}
    pieces: list[Piece] = []
    for write in loaded.writes:
        entry = loaded.entries[write.source]
        dtypes[entry.tensor] = str(loaded.dtypes[write.region.parameter]).removeprefix("torch.")
        pieces += _pieces(entry, write)
    held = [
        TensorSpec(spec.name, spec.shape, dtypes.get(spec.name, spec.dtype))
        for spec in tensors
        if spec.name in dtypes or spec.name in loaded.opaque
    ]
    opaque = tuple(Opaque(spec.name, loaded.opaque[spec.name]) for spec in held if spec.name in loaded.opaque)
    return RankManifest(rank, "target", tuple(held), merge_pieces(pieces), opaque)


def _pieces(entry: CheckpointEntry, write: Write) -> Iterable[Piece]:
    """A write in the logical tensor's dims, which have the experts first where the checkpoint has one per name, and
    fields last where it has them in turn.
    """
    view = write.region.view
    piece = Piece(entry.tensor, write.box, write.region.parameter, view.offset, view.strides)
    if entry.fields > 1:
        return split_last(piece, entry.fields)
    if entry.expert is None:
        return (piece,)
    box = Box((entry.box.spans[0], *write.box.spans))
    return (replace(piece, box=box, strides=(0, *view.strides)),)
