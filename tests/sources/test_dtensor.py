"""DTensors describe themselves: torch cuts, gathers and distributes; we only describe, and must agree."""

from __future__ import annotations

from contextlib import contextmanager

import dtensor_ranks
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from refit_transport.errors import LayoutError
from refit_transport.fabrics.program import Binding
from refit_transport.layout import placement as ours
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, TensorSpec
from refit_transport.layout.wire import manifest_from_json
from refit_transport.sources.dtensor import layout_of, source_of
from refit_transport.targets.module import DescribedTarget
from refit_transport.testing.delivery import deliver
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import layouts, meshes, shapes

WORLD = 8


@contextmanager
def as_rank(rank):
    """This process as one rank of a group that never communicates."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_placement(placement):
    match placement:
        case ours.Shard(dim):
            return Shard(dim)
        case ours.StridedShard(dim, factor):
            return _StridedShard(dim, split_factor=factor)
    return Replicate()


@st.composite
def dtensor_layouts(draw, shape):
    layout = draw(layouts(shape, draw(meshes(pool=range(WORLD)))))
    assume(not any(isinstance(placement, ours.BlockShard) for placement in layout.placements))
    return layout


def distributed(full, layout):
    """The DTensor of `full` on the process that we are now; torch cuts, without communication."""
    # torch caches by mesh what depends on the process's rank, so each rank has axis names of its own.
    names = tuple(f"{axis}{dist.get_rank()}" for axis in layout.mesh.axes)
    mesh = DeviceMesh("cpu", torch.tensor(layout.mesh.ranks).view(layout.mesh.shape), mesh_dim_names=names)
    return distribute_tensor(full, mesh, [torch_placement(p) for p in layout.placements], src_data_rank=None)


def side(full, layout, describe):
    """Every rank's manifest and live buffers."""
    bindings, locals_ = {}, {}
    for rank in layout.mesh.ranks:
        with as_rank(rank):
            tensor = distributed(full, layout)
            assert layout_of(tensor) == layout
            described, manifest = describe(tensor, rank)
            bindings[rank] = Binding.of(manifest, described.buffers())
            locals_[rank] = tensor.to_local()
    return Manifest.of(b.manifest for b in bindings.values()), HeldSide(bindings), locals_


@settings(max_examples=25)
@given(st.data())
def test_any_dtensor_arrives_in_any_other(data):
    shape = data.draw(shapes())
    here, there = data.draw(dtensor_layouts(shape)), data.draw(dtensor_layouts(shape))
    full = coordinate_tensor("w", shape, "float32")

    def as_source(tensor, rank):
        source = source_of({"w": tensor})
        return source, source.manifest(rank)

    def as_target(tensor, rank):
        target = DescribedTarget(source_of({"w": tensor}))
        return target, target.manifest(rank, [TensorSpec("w", shape, "float32")])

    source, held, _ = side(full, here, as_source)
    target, wanted, locals_ = side(torch.full(shape, 255.0), there, as_target)
    deliver(source, target, held=held, wanted=wanted, tensors={"w": full})
    for rank, local in locals_.items():
        with as_rank(rank):
            assert torch.equal(local, distributed(full, there).to_local())


@pytest.mark.parametrize("kind", ["fsdp", "fsdp over tp"])
def test_fsdp2_modules_describe_themselves(four_ranks, kind):
    outcomes = four_ranks.run(dtensor_ranks.trained_source, kind=kind)
    assert all(outcome["unchanged"] for outcome in outcomes)
    assert outcomes[0]["strided"] == ([] if kind == "fsdp" else ["up.weight", "up.bias"])
    manifests = [manifest_from_json(outcome["manifest"]) for outcome in outcomes]
    held = HeldSide({m.rank: Binding.of(m, o["buffers"]) for m, o in zip(manifests, outcomes, strict=True)})
    full = outcomes[0]["full"]
    assert not torch.equal(full["up.weight"], dtensor_ranks.build(seed=1).up.weight)
    module = dtensor_ranks.build(seed=2)
    target = DescribedTarget(source_of(module.state_dict))
    source = Manifest.of(manifests)
    described = target.manifest(4, source.tensors)
    wanted = HeldSide({4: Binding.of(described, target.buffers())})
    deliver(source, Manifest.of([described]), held=held, wanted=wanted, tensors=full)
    for name, value in module.state_dict().items():
        assert torch.equal(value, full[name]), name


def test_a_target_of_dtensors_is_gathered_to_what_was_written(four_ranks):
    full = {name: tensor.detach() for name, tensor in dtensor_ranks.build(seed=1).state_dict().items()}
    for gathered in four_ranks.run(dtensor_ranks.refilled_target, full=full):
        assert gathered.keys() == full.keys()
        assert all(torch.equal(gathered[name], full[name]) for name in full)


def test_a_rank_outside_the_mesh_holds_nothing(four_ranks):
    assert four_ranks.run(dtensor_ranks.submesh) == [["[6:7]"], ["[3:6]"], ["[0:3]"], []]


def local_dtensor(local, placements, shape):
    mesh = DeviceMesh("cpu", torch.arange(2))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(1,) * len(shape)
    )


def test_local_tensors_need_not_be_contiguous():
    memory = torch.full((64,), 255.0)
    with as_rank(1):
        for local in (memory.view(8, 8)[:6, :4].t(), memory.view(8, 8)[::2, 1:7:2]):
            memory.fill_(255.0)
            tensor = local_dtensor(local, [Shard(0)], (8, local.shape[1]))
            assert tensor.to_local().stride() == local.stride()
            target = DescribedTarget(source_of({"w": tensor}))
            manifest = target.manifest(1, [TensorSpec("w", (8, local.shape[1]), "float32")])
            full = torch.arange(8.0 * local.shape[1]).view(8, -1)
            target.load([("w", full)])
            assert torch.equal(local, full[4:])
            assert int((memory != 255).sum()) == local.numel()
            assert [piece.box for piece in manifest.pieces] == [Box.of((4, 8), (0, local.shape[1]))]


def test_partial_tensors_are_refused_with_the_reason():
    with as_rank(0), pytest.raises(LayoutError, match=r"tensor w: .*axis axis0.*addends: reduce it first"):
        source_of({"w": local_dtensor(torch.zeros(4), [Partial()], (4,))}).manifest(0)


def test_a_shard_whose_shape_contradicts_its_layout_is_refused():
    """Half of 512 where the placement says that every rank has the whole: the flag that says otherwise is missing."""
    with as_rank(0), pytest.raises(LayoutError, match=r"tensor w: rank 0: .*\[512, 2\].*got \[256, 2\]"):
        source_of({"w": local_dtensor(torch.zeros(256, 2), [Replicate()], (512, 2))}).manifest(0)


def test_what_no_source_sends_is_refused_unless_kept_or_tied():
    weight, other = torch.zeros(3, 2), torch.zeros(4)
    state = {"embed": weight, "head": weight, "extra": other}
    specs = [TensorSpec("embed", (3, 2), "float32"), TensorSpec("unwanted", (9,), "float32")]
    with pytest.raises(LayoutError, match="tensor extra: rank 0: expected a tensor that the source has, or one that"):
        DescribedTarget(source_of(state)).manifest(0, specs)
    manifest = DescribedTarget(source_of(state), kept=("extra",)).manifest(0, specs)
    assert [spec.name for spec in manifest.tensors] == [piece.tensor for piece in manifest.pieces] == ["embed"]


def test_a_target_whose_elements_share_memory_is_refused():
    for shared in (torch.zeros(1, 2).expand(3, 2), torch.zeros(9).as_strided((3, 3), (2, 1))):
        with pytest.raises(LayoutError, match="memory of its own for each element"):
            DescribedTarget(source_of({"w": shared})).manifest(0, [TensorSpec("w", tuple(shared.shape), "float32")])
        assert source_of({"w": shared}).manifest(0).pieces


def test_experts_are_boxes_of_the_stacked_tensor():
    state = {f"m.experts.{e}.up.weight": torch.full((2, 3), float(e)) for e in (1, 0, 2)}
    source = source_of(state)
    manifest = source.manifest(0)
    assert manifest.tensors == (TensorSpec("m.experts.up.weight", (3, 2, 3), "float32"),)
    assert [piece.box.offset[0] for piece in manifest.pieces] == [1, 0, 2]
    target = DescribedTarget(source_of({name: torch.zeros(2, 3) for name in state}))
    wanted = Manifest.of([target.manifest(1, manifest.tensors)])
    sides = (
        HeldSide({0: Binding.of(manifest, source.buffers())}),
        HeldSide({1: Binding.of(wanted.ranks[0], target.buffers())}),
    )
    full = {"m.experts.up.weight": torch.stack([state[f"m.experts.{e}.up.weight"] for e in range(3)])}
    assert deliver(Manifest.of([manifest]), wanted, held=sides[0], wanted=sides[1], tensors=full).differences == []
    target.load((name, tensor + 7) for name, tensor in state.items())
    assert all(torch.equal(target.buffers()[name], tensor + 7) for name, tensor in state.items())
    del state["m.experts.1.up.weight"]
    with pytest.raises(LayoutError, match=r"all experts 0 to 2 in the state dict, got \[0, 2\]"):
        source.manifest(0)


def test_a_source_that_is_asked_anew_follows_rebound_storage():
    state = {"w": torch.zeros(2)}
    source = source_of(lambda: state)
    source.manifest(0)
    state["w"] = torch.ones(2)
    assert source.buffers()["w"] is not None
    assert torch.equal(source.buffers()["w"], torch.ones(2))
