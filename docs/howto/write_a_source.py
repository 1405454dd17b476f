"""python docs/howto/write_a_source.py, and pytest docs/howto/write_a_source.py"""

import torch

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Piece, RankManifest, TensorSpec
from refit_transport.testing.contracts import SourceContract


class FusedSource:
    """A trainer that keeps this rank's rows of `gate` and `up` in one matrix, a row of each in turn."""

    def __init__(self, fused, *, first_row, rows):
        self.fused, self.first_row, self.rows = fused, first_row, rows

    def manifest(self, rank):
        count, width = self.fused.shape[0] // 2, self.fused.shape[1]
        names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        box = Box.at((self.first_row, 0), (count, width))
        # Every second row: the stride of a row is two rows of the buffer, and `up` begins one row later.
        pieces = [Piece(name, box, "fused", start * width, (2 * width, 1)) for start, name in enumerate(names)]
        specs = tuple(TensorSpec(name, (self.rows, width), "float32") for name in names)
        return RankManifest(rank, "source", specs, tuple(pieces))

    def buffers(self):
        return {"fused": self.fused}


class TestFusedSource(SourceContract):
    def make_source(self):
        return FusedSource(torch.arange(24.0).view(6, 4), first_row=3, rows=6)  # the second half of 6 rows

    def train(self, source):
        source.fused = source.fused + 100  # other storage: buffers() is asked again

    def tensors(self, source):
        gate, up = torch.zeros(6, 4), torch.zeros(6, 4)
        gate[3:], up[3:] = source.fused[0::2], source.fused[1::2]
        return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


class Stacked(FusedSource):
    """A mistake: describes the rows as if all of `gate` came first."""

    def manifest(self, rank):
        found = super().manifest(rank)
        rows, width = found.pieces[0].box.shape
        pieces = [Piece(p.tensor, p.box, "fused", i * rows * width, (width, 1)) for i, p in enumerate(found.pieces)]
        return RankManifest(rank, "source", found.tensors, tuple(pieces))


class SuiteOfStacked(TestFusedSource):
    __test__ = False

    def make_source(self):
        return Stacked(torch.arange(24.0).view(6, 4), first_row=3, rows=6)


if __name__ == "__main__":
    for piece in TestFusedSource().make_source().manifest(0).pieces:
        print(f"{piece.tensor}{piece.box}: element {piece.offset} of {piece.buffer!r}, strides {piece.strides}")
    TestFusedSource().test_a_refit_delivers_and_leaves_the_source_as_it_was()
    print("FusedSource: a refit delivers it")
    try:
        SuiteOfStacked().test_pieces_hold_what_they_say()
    except AssertionError as error:
        print(f"Stacked: {error}")
