"""Whatever describes its own tensors, as a target: an nn.Module, a state dict, a Megatron model for generation.

A description is what sources have: `sources.dtensor.source_of(module.state_dict)` describes a module, FSDP2's and
tensor parallel ones too, `sources.megatron.MegatronSource` a Megatron model. Refits write into the tensors in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from refit_transport.checksum import Derived
from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box, Span
from refit_transport.layout.canonical import canonical_name, has_fields_in_turn
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.layout.module_entries import by_entry
from refit_transport.layout.pieces import within
from refit_transport.memory import overlaps_itself
from refit_transport.planning.overlap import atoms_of, boxes_to_array, inside
from refit_transport.targets.strided import StridedView, locate
from refit_transport.views import box_view, piece_view


class Description(Protocol):
    """The part of `sources.base.Source` that says what a process holds."""

    def manifest(self, rank: int) -> RankManifest:
        """The tensors and pieces of this process, as refit rank `rank`."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that the pieces point into, by buffer name."""

    def copies(self) -> Collection[str]:
        """The buffers that are no live tensors but copies in another form."""

    def stored(self, copies: Mapping[str, torch.Tensor], /) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """For each copy with these values: the name of the tensor that it is of, that live tensor, and its values."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A source's tensor and the window of one described tensor that it fills."""

    spec: TensorSpec
    window: Box

    def of(self, piece: Piece) -> Piece | None:
        """What of a described tensor's piece lies in the window, as a piece of the source's tensor."""
        inner = within(piece, self.window)
        if inner is None:
            return None
        spans = (
            Span(span.start - start, span.stop - start)
            for span, start in zip(inner.box.spans, self.window.offset, strict=True)
        )
        return replace(inner, tensor=self.spec.name, box=Box(tuple(spans)))


class DescribedTarget:
    """Implements `targets.base.Target` on the tensors that `described` describes; refits leave the names in `kept`.

    Elements of a described buffer that belong to no tensor are padding, and zero after each refit. What is stored in
    another form (norms that Megatron stores less 1) is received beside the model, and stored at the end of the refit.
    """

    def __init__(self, described: Description, *, kept: Collection[str] = ()) -> None:
        self._described = described
        self._kept = frozenset(kept)
        self._pieces: dict[str, list[Piece]] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._padding: dict[str, tuple[Box, ...]] = {}
        self._received: dict[str, torch.Tensor] = {}
        self._is_filled = False

    def manifest(self, rank: int, tensors: Sequence[TensorSpec]) -> RankManifest:
        """See `targets.base.Target`; the source's tensors that aren't described here are ignored.

        Raises:
            LayoutError: a described tensor that the source lacks, that isn't kept and that shares no memory with one
                that the source has; one of another shape; or memory that two of its elements share.
        """
        own, buffers = self._described.manifest(rank), self._described.buffers()
        known = {spec.name: spec for spec in tensors}
        entries = by_entry(known)
        parts = {
            spec.name: _parts(spec, [known[name] for name in _filling(spec.name, known, entries)], rank)
            for spec in own.tensors
            if spec.name not in self._kept
        }
        wanted = [piece for piece in own.pieces if parts.get(piece.tensor)]
        filled = {_memory(piece, buffers) for piece in wanted}
        for piece in own.pieces:
            unfilled = piece.tensor not in self._kept and not parts[piece.tensor]
            if unfilled and _memory(piece, buffers) not in filled:
                raise LayoutError(piece.tensor, rank, "a tensor that the source has, or one that is kept", "neither")
            if overlaps_itself(buffers[piece.buffer]):
                got = f"{list(buffers[piece.buffer].shape)} strided {list(buffers[piece.buffer].stride())}"
                raise LayoutError(piece.tensor, rank, "memory of its own for each element", got)
        self._pieces.clear()
        self._specs = specs = dict[str, TensorSpec]()
        for piece in wanted:
            for part in parts[piece.tensor]:
                if specs.setdefault(part.spec.name, part.spec) != part.spec:
                    raise LayoutError(part.spec.name, rank, str(specs[part.spec.name]), str(part.spec))
                inner = part.of(piece)
                if inner is not None:
                    self._pieces.setdefault(part.spec.name, []).append(inner)
        self._padding = _padding(own, buffers, rank)
        wanted_buffers = {piece.buffer for piece in wanted}
        self._received = {
            name: torch.zeros_like(buffers[name]) for name in self._described.copies() if name in wanted_buffers
        }
        self._is_filled = False
        pieces = tuple(piece for found in self._pieces.values() for piece in found)
        return RankManifest(rank, "target", tuple(specs.values()), pieces)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """See `targets.base.Target`."""
        names = {piece.buffer for found in self._pieces.values() for piece in found}
        live = {name: tensor for name, tensor in self._described.buffers().items() if name in names}
        return live | self._received

    def private_layers(self) -> Mapping[str, str]:
        """None: the tensors are what is used."""
        return {}

    def begin(self) -> None:
        """Nothing to open."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies this process's part of each whole tensor. After `manifest`."""
        buffers = self.buffers()
        for name, whole in weights:
            found = canonical_name(name)
            spec = self._specs.get(found.tensor)
            if spec is not None and has_fields_in_turn(spec.name, spec.shape):
                whole = whole.view(spec.shape)
            around = Box.full(whole.shape)
            if found.expert is not None:
                whole, around = whole[None], Box((Span(found.expert, found.expert + 1), *around.spans))
            for piece in self._pieces.get(found.tensor, ()):
                common = piece.box.intersect(around)
                if common is not None:
                    view = box_view(piece_view(piece, buffers), piece.box, common)
                    view.copy_(box_view(whole, around, common))

    def finish(self) -> None:
        """Zeroes the padding, and stores what was received beside the model."""
        with torch.no_grad():
            for _, live, values in self._described.stored(self._received):
                live.copy_(values)
        self._is_filled = True
        buffers = self._described.buffers()
        for name, boxes in self._padding.items():
            for box in boxes:
                box_view(buffers[name], Box.full(buffers[name].shape), box).zero_()

    def served(self) -> Mapping[str, torch.Tensor]:
        """All buffers but those received beside the model."""
        return {name: tensor for name, tensor in self.buffers().items() if name not in self._received}

    def derived(self) -> Iterator[Derived]:
        """What is stored in another form, once it has been received."""
        if self._is_filled:
            for name, live, values in self._described.stored(self._received):
                yield Derived(name, live, values)


def _filling(name: str, known: Collection[str], entries: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The source's tensors in a described one, which has a checkpoint's name or that of a transformers module."""
    return (name,) if name in known else entries.get(name, ())


def _parts(spec: TensorSpec, filling: Sequence[TensorSpec], rank: int) -> tuple[_Part, ...]:
    """The source's tensors that fill a described one, together all of it; none when the source hasn't got them.

    They lie behind each other in dim 1, unless it is one.
    """
    if not filling:
        return ()
    parts, start = [], 0
    for each in filling:
        shape = each.shape
        if len(filling) > 1 and len(shape) == len(spec.shape) > 1:
            window = Box((Span(0, shape[0]), Span(start, start + shape[1]), *Box.full(shape[2:]).spans))
            start += shape[1]
        else:
            window = Box.full(shape)
        parts.append(_Part(TensorSpec(each.name, shape, spec.dtype), window))
    sizes = tuple(start if dim == 1 and len(filling) > 1 else size for dim, size in enumerate(filling[0].shape))
    same_sides = {(each.shape[0], *each.shape[2:]) for each in filling if each.shape}
    if sizes != spec.shape or len(same_sides) > 1:
        expected = " and ".join(f"{each.name} {list(each.shape)}" for each in filling)
        raise LayoutError(spec.name, rank, f"the size of the source's {expected}", str(list(spec.shape)))
    return tuple(parts)


def _memory(piece: Piece, buffers: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    view = piece_view(piece, buffers)
    return view.data_ptr(), tuple(view.shape), view.stride()


def _padding(own: RankManifest, buffers: Mapping[str, torch.Tensor], rank: int) -> dict[str, tuple[Box, ...]]:
    """The boxes of each buffer that hold no element of any tensor, by buffer name."""
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in own.pieces:
        pieces[piece.buffer].append(piece)
    found = {}
    for name, held in pieces.items():
        buffer = buffers[name]
        if sum(piece.box.numel for piece in held) < buffer.numel():
            found[name] = _rest(buffer, held, rank)
    return found


def _rest(buffer: torch.Tensor, held: Sequence[Piece], rank: int) -> tuple[Box, ...]:
    shape = tuple(buffer.shape)
    views = [StridedView(piece.offset, piece.box.shape, piece.strides) for piece in held]
    located = [locate(view, shape, (0,) * len(view.shape)) for view in views]
    if not buffer.is_contiguous() or any(each is None for each in located):
        raise LayoutError(held[0].tensor, rank, "boxes of a contiguous buffer, with padding around", held[0].buffer)
    cover = boxes_to_array((each.box for each in located if each is not None), len(shape))
    cells = atoms_of(np.concatenate((boxes_to_array([Box.full(shape)], len(shape)), cover)))
    rest = cells[~inside(cells, cover).any(axis=1)]
    return tuple(Box.of(*((int(start), int(stop)) for start, stop in cell)) for cell in rest)
