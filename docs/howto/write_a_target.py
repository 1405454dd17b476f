"""python docs/howto/write_a_target.py, and pytest docs/howto/write_a_target.py"""

import torch

from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Opaque, Piece, RankManifest, TensorSpec
from refit_transport.testing.contracts import TargetContract

WEIGHT, DECAY = "proj.weight", "decay"


class Engine:
    """What samples: two of four columns of `weight`, transposed, and minus the exponential of `decay`."""

    def __init__(self):
        self.columns, self.rate = torch.zeros(2, 6), torch.zeros(6)


class EngineTarget:
    """`weight` is written in place, shard to shard; of `decay` the engine computes something, so it arrives whole."""

    def __init__(self, engine):
        self.engine = engine

    def manifest(self, rank, tensors):
        found = {spec.name: spec for spec in tensors}
        for name in (WEIGHT, DECAY):
            if name not in found:
                raise LayoutError(name, rank, "a tensor that the source has", "none")
        piece = Piece(WEIGHT, Box.at((0, 2), (6, 2)), "columns", 0, (1, 6))  # down a column: the next element
        spec = TensorSpec(WEIGHT, found[WEIGHT].shape, "float32")
        return RankManifest(rank, "target", (spec,), (piece,), (Opaque(DECAY, "the engine keeps -exp(decay)"),))

    def buffers(self):
        return {"columns": self.engine.columns}

    def private_layers(self):
        return {}

    def begin(self):
        pass

    def load(self, weights):
        for name, tensor in weights:
            if name == DECAY:
                self.engine.rate.copy_(-tensor.exp())
            elif name == WEIGHT:
                self.engine.columns.copy_(tensor[:, 2:4].t())

    def finish(self):
        pass

    def served(self):
        return self.buffers()

    def derived(self):
        return iter(())


class TestEngineTarget(TargetContract):
    target_class = EngineTarget

    def make_target(self):
        return self.target_class(Engine())

    def tensors(self, version):
        return {WEIGHT: torch.arange(24.0).view(6, 4) + 100 * version, DECAY: torch.linspace(0, 1, 6) * version}

    def values(self, target):
        return {"columns": target.engine.columns.clone(), "rate": target.engine.rate.clone()}

    def expected(self, version):
        found = self.tensors(version)
        return {"columns": found[WEIGHT][:, 2:].t().contiguous(), "rate": -found[DECAY].exp()}


class Once(EngineTarget):
    """A mistake: computes with `decay` only at the first refit."""

    def load(self, weights):
        if not self.engine.rate.any():
            super().load(weights)


class SuiteOfOnce(TestEngineTarget):
    __test__ = False
    target_class = Once


if __name__ == "__main__":
    TestEngineTarget().test_shards_are_served_after_each_refit()
    print("EngineTarget: versions 1, 2 and 1 again are served")
    try:
        SuiteOfOnce().test_shards_are_served_after_each_refit()
    except AssertionError as error:
        print(f"Once: {error}")
