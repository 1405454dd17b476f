"""Our own sources, targets and transports under the suites that plugins are tested with."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from third_party_transport import Counting
from torch import nn

from refit_transport.config.settings import RefitSettings
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placement import Replicate, Shard
from refit_transport.sources.dtensor import source_of
from refit_transport.sources.tensors import Local, TensorSource, TensorTarget
from refit_transport.staging import StagedTarget
from refit_transport.targets.module import DescribedTarget
from refit_transport.testing.contracts import SourceContract, TargetContract, TransportContract
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.sides import HeldTarget
from refit_transport.transports.gather_broadcast import GatherBroadcast
from refit_transport.transports.nccl_reshard import NcclReshard


class TestTensorSource(SourceContract):
    """Rank 1 of 2's columns, transposed in memory, and a whole tensor."""

    def make_source(self):
        self.whole = {name: coordinate_tensor(name, (6, 8), "float32") for name in ("a", "b")}
        self.columns = torch.empty(4, 6).t()
        self.columns.copy_(self.whole["a"][:, 4:])
        layout = Layout((6, 8), Mesh.of(tp=2), (Shard(1),))
        return TensorSource({"a": Local(self.columns, layout), "b": self.whole["b"]}, global_rank=1)

    def train(self, source):
        for tensor in (self.columns, *self.whole.values()):
            tensor.add_(1)

    def tensors(self, source):
        return {"a": torch.cat([self.whole["a"][:, :4], self.columns], 1), "b": self.whole["b"].clone()}


class Net(nn.Module):
    def __init__(self, version=0):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 4, bias=False), nn.LayerNorm(6)
        self.register_buffer("scale", torch.zeros(3))
        for name, tensor in self.state_dict().items():
            tensor.copy_(coordinate_tensor(name, tuple(tensor.shape), "float32", version=version))


class TestModuleSource(SourceContract):
    """A module that gets new parameters at each step, as under FSDP2."""

    def make_source(self):
        self.module = Net()
        return source_of(self.module.state_dict)

    def train(self, source):
        self.module.load_state_dict({n: x + 1 for n, x in self.module.state_dict().items()}, assign=True)

    def tensors(self, source):
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


class TestMegatronSource(SourceContract):
    """A chunk with half of a fused QKV, whose rows belong to three checkpoint tensors."""

    def make_source(self):
        pytest.importorskip("megatron.core")
        from test_megatron_source import FLAGGED, MODEL, Chunk

        from refit_transport.sources.megatron import MegatronSource

        self.chunk = Chunk(**FLAGGED)
        return MegatronSource([self.chunk], MODEL)

    def train(self, source):
        self.chunk.weight.data = self.chunk.weight.data + 1

    def tensors(self, source):
        # Rank 1 of 2, of one query group each: two rows of queries per head of two, then keys, then values.
        rows, stem = self.chunk.weight.detach(), "model.layers.1.self_attn."
        other = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8)}
        parts = {"q_proj": rows[:4], "k_proj": rows[4:6], "v_proj": rows[6:]}
        return {
            f"{stem}{name}.weight": torch.cat([torch.zeros(shape[0] // 2, 8), parts[name]])
            for name, shape in other.items()
        }


class TestTensorTarget(TargetContract):
    """Rank 0 of 2's rows, of which an odd one is left over, in bfloat16."""

    loads_whole = False

    def make_target(self):
        self.rows, self.whole = torch.zeros(4, 5, dtype=torch.bfloat16), torch.zeros(3)
        rows = Local(self.rows, Layout((7, 5), Mesh.of(tp=2), (Shard(0),)))
        return TensorTarget({"a": rows, "b": self.whole}, global_rank=0)

    def tensors(self, version):
        return {n: coordinate_tensor(n, s, "float32", version=version) for n, s in {"a": (7, 5), "b": (3,)}.items()}

    def values(self, target):
        return {"rows": self.rows.clone(), "b": self.whole.clone()}

    def expected(self, version):
        found = self.tensors(version)
        return {"rows": found["a"][:4].bfloat16(), "b": found["b"]}


class TestModuleTarget(TargetContract):
    def make_target(self):
        self.module = Net()
        return DescribedTarget(source_of(self.module.state_dict))

    def tensors(self, version):
        return {
            n: coordinate_tensor(n, tuple(x.shape), "float32", version=version) for n, x in Net().state_dict().items()
        }

    def values(self, target):
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def expected(self, version):
        return self.tensors(version)


class AtOnce(StagedTarget):
    """Takes over when all has arrived, as a session that commits staged has it do."""

    def finish(self):
        self.apply()


class TestStagedTarget(TestModuleTarget):
    def make_target(self):
        return AtOnce(super().make_target())


class TestHeldTarget(TestModuleTarget):
    """The target that tests of sessions use: experts, each of which is a checkpoint tensor of its own, and a norm."""

    SHAPES: ClassVar = {"m.experts.up_proj.weight": (4, 3, 5), "m.norm.weight": (5,)}

    def make_target(self):
        mesh = Mesh.of(ep=2)
        layouts = {name: Layout(s, mesh, (Shard(0) if len(s) > 1 else Replicate(),)) for name, s in self.SHAPES.items()}
        self.binding = HeldSide.of(manifest_from_layouts("target", layouts, dtype="float32")).bindings[1]
        return HeldTarget(self.binding)

    def tensors(self, version):
        return {name: coordinate_tensor(name, s, "float32", version=version) for name, s in self.SHAPES.items()}

    def values(self, target):
        views = {piece.tensor: self.binding.view(index) for index, piece in enumerate(self.binding.manifest.pieces)}
        return {name: view.clone() for name, view in views.items()}

    def expected(self, version):
        found = self.tensors(version)
        return {**found, "m.experts.up_proj.weight": found["m.experts.up_proj.weight"][2:]}


class TestNcclReshard(TransportContract):
    transport_class = NcclReshard


class TestGatherBroadcast(TransportContract):
    transport_class = GatherBroadcast


class TestGatherBroadcastInOneChain(TransportContract):
    transport_class = GatherBroadcast

    def settings(self):
        return RefitSettings(chains="single", bucket_bytes=100, staging_bytes=400, shared_memory="off")


class TestAnotherPackagesTransport(TransportContract):
    transport_class = Counting
