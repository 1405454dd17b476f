"""The suite for `sources.base.Source`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_transport.fabrics.binding import Binding
from refit_transport.layout.layout import row_major_strides
from refit_transport.layout.manifest import Manifest, Piece, RankManifest
from refit_transport.sources.base import Source
from refit_transport.testing.contracts.checks import check_manifest, check_pieces, check_values, same_values
from refit_transport.testing.delivery import deliver
from refit_transport.testing.oracle import HeldSide

_RANK = 3


class SourceContract:
    """One process's source. Fill in `make_source`, `train` and `tensors`."""

    def make_source(self) -> Source:
        """A new source over small weights in which no two elements that lie side by side are equal."""
        raise NotImplementedError

    def train(self, source: Source) -> None:
        """Changes every weight that the source stands on, as an optimizer's step would."""
        raise NotImplementedError

    def tensors(self, source: Source) -> Mapping[str, torch.Tensor]:
        """The whole logical tensors by canonical name as they are now, found without the source's own manifest."""
        raise NotImplementedError

    def test_the_manifest_is_of_the_asked_rank_and_role(self) -> None:
        """`manifest(rank)` is about that rank; the source doesn't choose its own number."""
        source = self.make_source()
        for rank in (0, _RANK):
            check_manifest(source.manifest(rank), rank=rank, role="source")

    def test_the_manifest_describes_something(self) -> None:
        """A source that describes no element would send nothing, without an error."""
        assert any(piece.box.numel for piece in self.make_source().manifest(_RANK).pieces), "the manifest is empty"

    def test_the_manifest_stays_as_it_is(self) -> None:
        """All ranks plan once from it: neither a second call nor training may change it."""
        source = self.make_source()
        first = source.manifest(_RANK)
        assert source.manifest(_RANK) == first, "a second manifest() differs from the first"
        self.train(source)
        assert source.manifest(_RANK) == first, "after training the manifest differs"

    def test_pieces_lie_in_their_buffers(self) -> None:
        """Names, dtypes and extents of pieces are those of the buffers."""
        source = self.make_source()
        check_pieces(source.manifest(_RANK), source.buffers())

    def test_pieces_hold_what_they_say(self) -> None:
        """Element by element, each piece is its box of the logical tensor."""
        source = self.make_source()
        manifest = source.manifest(_RANK)
        check_values(manifest, source.buffers(), self.tensors(source))

    def test_buffers_follow_training(self) -> None:
        """`buffers()` is asked before each refit and must have the weights of then, wherever they lie by then."""
        source = self.make_source()
        manifest = source.manifest(_RANK)
        before = {name: buffer.clone() for name, buffer in source.buffers().items()}
        self.train(source)
        after = source.buffers()
        assert after.keys() == before.keys(), f"buffers() has other names after training: {sorted(after)}"
        assert any(not torch.equal(before[name], after[name]) for name in before), "train() left every weight as it was"
        check_values(manifest, after, self.tensors(source))

    def test_buffers_keep_their_form(self) -> None:
        """A refit refuses a buffer whose dtype, shape or strides aren't those of the first refit."""
        source = self.make_source()
        source.manifest(_RANK)
        forms = []
        for _ in range(2):
            self.train(source)
            forms.append(
                {name: (tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in source.buffers().items()}
            )
        assert forms[0] == forms[1], f"buffers changed their form: {forms[0]} then {forms[1]}"

    def test_a_refit_delivers_and_leaves_the_source_as_it_was(self) -> None:
        """Planned, scheduled and executed against a rank that needs all that this one holds."""
        source = self.make_source()
        manifest = source.manifest(_RANK)
        for _ in range(2):
            held = HeldSide({_RANK: Binding.of(manifest, source.buffers())})
            before = {name: buffer.clone() for name, buffer in source.buffers().items()}
            found = deliver(Manifest.of([manifest]), _needing(manifest), tensors=self.tensors(source), held=held)
            assert not found.differences, f"arrived wrong: {found.differences}"
            same_values(source.buffers(), before, when="after a refit the source's buffers")
            self.train(source)


def _needing(held: RankManifest) -> Manifest:
    """A target rank with a buffer of its own for each box that the source holds."""
    boxes = dict.fromkeys((piece.tensor, piece.box) for piece in held.pieces)
    pieces = tuple(
        Piece(tensor, box, f"{tensor}/{index}", 0, row_major_strides(box.shape))
        for index, (tensor, box) in enumerate(boxes)
    )
    return Manifest.of([RankManifest(_RANK + 1, "target", held.tensors, pieces)])
