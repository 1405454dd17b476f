"""Layouts that have gone wrong in the field, end to end: every element is told apart by its global place."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.config.settings import RefitSettings
from refit_transport.errors import LayoutError, PlanError
from refit_transport.layout.box import Box
from refit_transport.layout.fusion import Fusion, Part
from refit_transport.layout.layout import Layout, manifest_from_layouts
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.pieces import within
from refit_transport.layout.placement import BlockShard, Partial, Replicate, Shard, StridedShard
from refit_transport.planning.planner import plan_transfer
from refit_transport.refit_plan import RefitPlan
from refit_transport.scheduling.topology import Topology
from refit_transport.testing.delivery import deliver
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.strategies import manifest_pairs
from refit_transport.transports.base import Job
from refit_transport.verification import BoxesHere


def side(role, layouts, *, dtype="float32"):
    return manifest_from_layouts(role, layouts, dtype=dtype)


def rows(shape, ranks, *, first_rank=0):
    return Layout(shape, Mesh.of(first_rank=first_rank, tp=ranks), (Shard(0),))


def whole(shape, ranks, *, first_rank=0):
    return Layout(shape, Mesh.of(first_rank=first_rank, dp=ranks), (Replicate(),))


def fused_side(role, layout, fusion, *, dtype="float32"):
    """A side whose ranks hold one fused parameter in this layout, described as its parts."""
    manifests = []
    for rank in layout.mesh.ranks:
        pieces = fusion.unfuse(layout.pieces(rank, "fused", buffer="fused"))
        specs = {p.tensor: TensorSpec(p.tensor, fusion.shape(p.tensor, layout.shape), dtype) for p in pieces}
        manifests.append(RankManifest(rank, role, tuple(specs.values()), pieces))
    return Manifest.of(manifests)


def clipped(manifest, shape):
    """The side with padded parameters, described by the true elements only."""
    return Manifest.of(
        RankManifest(
            ranked.rank,
            ranked.role,
            tuple(TensorSpec(spec.name, shape, spec.dtype) for spec in ranked.tensors),
            tuple(part for piece in ranked.pieces if (part := within(piece, Box.full(shape)))),
        )
        for ranked in manifest.ranks
    )


def assert_exact(delivery):
    assert delivery.differences == []
    assert delivery.strays == []


@given(manifest_pairs(ranks="any"), st.sampled_from((1, 64, 4096)))
def test_any_layouts_on_any_rank_sets_from_and_to_any_local_memory(pair, bucket):
    assert_exact(deliver(*pair, bucket_bytes=bucket))


def test_fewer_kv_heads_than_ranks_in_a_fused_parameter():
    """64 query heads and 2 kv heads of 2 rows, interleaved over TP8 in even rows: cuts fall anywhere. To TP4 stacks."""
    heads = Fusion(0, (Part("q", 64), Part("k", 2), Part("v", 2)), groups=2)
    source = fused_side("source", rows((heads.size, 3), 8), heads)
    without_k = [r.rank for r in source.ranks if not any(piece.tensor == "k" for piece in r.pieces)]
    assert without_k == [0, 1, 2, 4, 5, 6]
    kv = Layout((4, 3), Mesh.of(first_rank=8, kv=2, copy=2), (Shard(0), Replicate()))
    target = side("target", {"q": rows((128, 3), 4, first_rank=8), "k": kv, "v": kv})
    assert_exact(deliver(source, target))


def test_replicated_kv_heads_enter_a_domain_once():
    kv = Layout((2, 5), Mesh.of(first_rank=2, kv=2, copy=2), (Shard(0), Replicate()))
    assert [kv.region(rank) for rank in range(2, 6)] == [(Box.of((h, h + 1), (0, 5)),) for h in (0, 0, 1, 1)]
    delivery = deliver(side("source", {"k": rows((2, 5), 2)}), side("target", {"k": kv}))
    assert_exact(delivery)
    assert delivery.network_bytes == 2 * 5 * 4


@pytest.mark.parametrize(
    ("true", "padded", "ranks", "padded_to", "target_ranks"),
    [(1003, 1024, 4, 1008, 3), (151, 160, 4, 151, 1), (7, 16, 4, 8, 2)],
)
def test_padded_rows_neither_travel_nor_arrive(true, padded, ranks, padded_to, target_ranks):
    """The target's own padding stays as it was; the source's is never read."""
    source = clipped(side("source", {"w": rows((padded, 2), ranks)}), (true, 2))
    target = clipped(side("target", {"w": rows((padded_to, 2), target_ranks, first_rank=ranks)}), (true, 2))
    delivery = deliver(source, target)
    assert_exact(delivery)
    assert delivery.network_bytes == true * 2 * 4
    assert sum(piece.box.numel for ranked in target.ranks for piece in ranked.pieces) == true * 2


def test_checksums_are_over_true_rows():
    """151 rows, padded to 160 over 4 source ranks and to 153 over 3 target ranks: padding counts on neither side."""
    source = clipped(side("source", {"w": rows((160, 2), 4)}), (151, 2))
    target = clipped(side("target", {"w": rows((153, 2), 3, first_rank=4)}), (151, 2))
    tensors = {"w": coordinate_tensor("w", (151, 2), "float32")}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target, tensors)
    verifier = RefitPlan(Job(source, target, Topology.of([range(7)]), RefitSettings(coverage="all"))).verifier
    chosen = verifier.atoms(0, share="full")
    assert sum(atoms.plan.box(row).numel for atoms in chosen for row in atoms.rows) == 151 * 2
    found = [checksums_of(held, wanted, chosen)]
    for half in (held, wanted):
        for binding in half.bindings.values():
            for buffer in binding.buffers.values():
                outside = torch.ones_like(buffer, dtype=torch.bool)
                for piece in binding.manifest.pieces:
                    outside.as_strided(piece.box.shape, piece.strides, piece.offset).fill_(False)
                assert bool(outside.any())
                buffer[outside] = 7.0
        found.append(checksums_of(held, wanted, chosen))
    assert all(there == {here} for here, there in found[0])
    assert found[0] == found[1] == found[2]


def checksums_of(held, wanted, chosen):
    """For each box, the first holder's checksum and those of all wanters."""
    here = {rank: BoxesHere.of_source(binding, chosen).checksums() for rank, binding in held.bindings.items()}
    there = {rank: BoxesHere.of_target(binding, chosen).checksums() for rank, binding in wanted.bindings.items()}
    return [
        (expected, {served for rank in atoms.wanters for served in there[rank][atoms.number][index]})
        for atoms in chosen
        for index, [expected] in enumerate(here[atoms.holders[0]][atoms.number])
    ]


def test_true_sizes_that_differ_are_refused_with_both():
    with pytest.raises(LayoutError, match=r"tensor w: rank 4: .*source's shape \[1003, 2\].*target's \[1000, 2\]"):
        plan_transfer(
            clipped(side("source", {"w": rows((1024, 2), 4)}), (1003, 2)),
            clipped(side("target", {"w": rows((1008, 2), 3, first_rank=4)}), (1000, 2)),
        )


@pytest.mark.parametrize(
    ("size", "parts", "shares"), [(64, 6, [11] * 5 + [9]), (10, 4, [3, 3, 3, 1]), (3, 4, [1, 1, 1, 0])]
)
def test_uneven_and_empty_shards(size, parts, shares):
    source = rows((size, 3), parts)
    assert [source.local_shape(rank)[0] for rank in range(parts)] == shares
    delivery = deliver(side("source", {"w": source}), side("target", {"w": rows((size, 3), 4, first_rank=parts)}))
    assert_exact(delivery)
    assert delivery.network_bytes == size * 3 * 4


def test_layers_live_on_the_ranks_of_their_stage_only():
    """5 layers on two pipeline stages of 2 tensor-parallel ranks, to one stage of 3."""
    source = {f"layers.{layer}.w": rows((7, 2), 2, first_rank=2 * (layer >= 3)) for layer in range(5)}
    target = {name: rows((7, 2), 3, first_rank=4) for name in source}
    assert_exact(deliver(side("source", source), side("target", target)))


def test_layers_that_no_stage_holds_are_named():
    """30 layers in four stages that hold 28, as when a count per stage is wrong."""
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(30) for part in ("up", "down")]
    source = {n: rows((4, 2), 1, first_rank=int(n.split(".")[2]) // 7) for n in names if int(n.split(".")[2]) < 28}
    target = {name: rows((4, 2), 2, first_rank=4) for name in names}
    with pytest.raises(LayoutError) as caught:
        RefitPlan(Job(side("source", source), side("target", target), Topology.of([range(6)]), RefitSettings()))
    assert caught.value.tensor.startswith("model.layers.28.")
    assert caught.value.rank == 4
    assert "nor 3 others; no source rank holds anything of model.layers.28, model.layers.29" in str(caught.value)


def test_a_name_that_the_source_lacks_is_refused_with_the_rank_that_needs_it():
    source = side("source", {"model.layers.0.a": rows((4, 2), 2)})
    target = side(
        "target", {"model.layers.0.a": rows((4, 2), 2, first_rank=2), "model.layers.0.b": rows((4,), 1, first_rank=3)}
    )
    with pytest.raises(
        LayoutError,
        match=r"tensor model.layers.0.b: rank 3: expected a tensor that the source has.*, got no such tensor$",
    ):
        plan_transfer(source, target)


def test_a_tensor_on_two_pipeline_stages_travels_once():
    """A tied embedding on the first and the last stage; test_session has what happens when its values differ."""
    here = Layout((6, 4), Mesh.from_ranks(("pp",), (2,), (0, 3)), (Replicate(),))
    delivery = deliver(side("source", {"w": here}), side("target", {"w": whole((6, 4), 2, first_rank=4)}))
    assert_exact(delivery)
    assert delivery.network_bytes == 6 * 4 * 4


def test_one_more_target_rank_is_another_plan():
    source = side("source", {"w": rows((8, 3), 2)})
    plans = []
    for replicas in (2, 3):
        target = side("target", {"w": whole((8, 3), replicas, first_rank=2)})
        plan = RefitPlan(Job(source, target, Topology.of([range(2 + replicas)]), RefitSettings(coverage="all")))
        assert plan.summary().received_by_rank == dict.fromkeys(range(2, 2 + replicas), 8 * 3 * 4)
        plans.append(plan.digest())
    assert plans[0] != plans[1]


def test_experts_stored_one_by_one_and_fused():
    """Six experts of [5, 3] gates and ups: a parameter for each, over two ranks, and [3, 2 * 5, 3] on each of two."""
    specs = tuple(TensorSpec(f"experts.{part}_proj.weight", (6, 5, 3), "float32") for part in ("gate", "up"))

    def one_by_one(role, first):
        def pieces(rank):
            for spec in specs:
                for expert in range(3 * rank, 3 * rank + 3):
                    box = Box.of((expert, expert + 1), (0, 5), (0, 3))
                    yield Piece(spec.name, box, f"{expert}.{spec.name}", 0, (1, 3, 1))

        return Manifest.of([RankManifest(first + rank, role, specs, tuple(pieces(rank))) for rank in (0, 1)])

    def fused(role, first):
        """Rank 0 has the even experts: an engine's expert map need not be in order."""

        def pieces(rank):
            for place, expert in enumerate(range(rank, 6, 2)):
                for number, spec in enumerate(specs):
                    box = Box.of((expert, expert + 1), (0, 5), (0, 3))
                    yield Piece(spec.name, box, "w13", (place * 2 + number) * 15, (30, 3, 1))

        return Manifest.of([RankManifest(first + rank, role, specs, tuple(pieces(rank))) for rank in (0, 1)])

    for source, target in ((one_by_one, fused), (fused, one_by_one), (fused, fused)):
        assert_exact(deliver(source("source", 0), target("target", 2)))
    fewer = RankManifest(1, "source", (TensorSpec(specs[0].name, (5, 5, 3), "float32"),), ())
    with pytest.raises(LayoutError, match=r"rank 1: expected \[6, 5, 3\] float32, got \[5, 5, 3\] float32"):
        Manifest.of([one_by_one("source", 0).ranks[0], fewer])


PROJECTIONS = Fusion(0, tuple(map(Part, ("q", "k", "v", "z", "beta", "alpha"), (8, 8, 16, 16, 2, 2))))
MAMBA = Fusion(0, tuple(map(Part, ("z", "x", "B", "C", "dt"), (8, 8, 4, 4, 4))))


@pytest.mark.parametrize(("fusion", "parts"), [(PROJECTIONS, 1), (MAMBA, 1), (MAMBA, 4)])
def test_packed_projections_are_cut_block_by_block(fusion, parts):
    def packed(role, ranks, first_rank):
        cut = BlockShard.evenly(0, fusion.blocks, parts=ranks)
        layout = Layout((fusion.size, 3), Mesh.of(first_rank=first_rank, tp=ranks), (cut,))
        assert {layout.local_shape(rank)[0] for rank in layout.mesh.ranks} == {fusion.size // ranks}
        return fused_side(role, layout, fusion)

    assert_exact(deliver(packed("source", 2, 0), packed("target", parts, 2)))
    separate = {part.tensor: rows((part.size, 3), 2, first_rank=2) for part in fusion.parts}
    assert_exact(deliver(packed("source", 2, 0), side("target", separate)))


def test_blocks_that_the_ranks_do_not_divide_are_refused():
    with pytest.raises(LayoutError, match=r"tensor in_proj: expected blocks that 4 ranks divide, got block 4 of 2"):
        BlockShard.evenly(0, PROJECTIONS.blocks, parts=4, tensor="in_proj")


@pytest.mark.parametrize("axes", [{"dp": 4}, {"a": 2, "b": 2}])
def test_everything_replicated_travels_once_in_few_messages(axes):
    def replicas(first_rank, **axes):
        mesh = Mesh.of(first_rank=first_rank, **axes)
        return Layout((6, 5), mesh, (Replicate(),) * len(axes))

    for source, target in ((replicas(0, **axes), replicas(4, one=1)), (replicas(0, one=1), replicas(4, **axes))):
        delivery = deliver(side("source", {"w": source}), side("target", {"w": target}))
        assert_exact(delivery)
        assert delivery.network_bytes == 6 * 5 * 4
        assert delivery.messages <= 2 * len(target.mesh.ranks)


def test_transposed_and_stepped_memory_on_both_sides():
    spec = TensorSpec("w", (4, 6), "float32")
    transposed = Piece("w", Box.full((4, 6)), "w", 0, (1, 4))
    stepped = Piece("w", Box.full((4, 6)), "w", 7, (16, 2))
    for here, there in itertools.product((transposed, stepped), repeat=2):
        source = Manifest.of([RankManifest(0, "source", (spec,), (here,))])
        target = Manifest.of([RankManifest(1, "target", (spec,), (there,))])
        assert_exact(deliver(source, target))


@pytest.mark.parametrize("ranks", [(12, 3, 7, 9), (3, 2, 1, 0)])
def test_any_rank_numbers_on_several_axes(ranks):
    mesh = Mesh.from_ranks(("dp", "tp"), (2, 2), ranks)
    target = side("target", {"w": Layout((6, 4), mesh, (Replicate(), Shard(1)))})
    assert [ranked.rank for ranked in target.ranks] == sorted(ranks)
    assert_exact(deliver(side("source", {"w": rows((6, 4), 3, first_rank=20)}), target))


def test_one_engine_over_two_hosts_and_two_engines_on_one():
    over_two = rows((32, 2), 16, first_rank=4)
    delivery = deliver(
        side("source", {"w": rows((32, 2), 4)}),
        side("target", {"w": over_two}),
        domains=[range(4), range(4, 12), range(12, 20)],
    )
    assert_exact(delivery)
    assert delivery.network_bytes == 32 * 2 * 4
    engines = Layout((32, 2), Mesh.of(first_rank=4, dp=2, tp=2), (Replicate(), Shard(0)))
    delivery = deliver(side("source", {"w": rows((32, 2), 4)}), side("target", {"w": engines}))
    assert_exact(delivery)
    assert delivery.network_bytes == 32 * 2 * 4


def test_a_dtype_of_one_rank_alone_is_refused():
    manifests = list(side("source", {"w": rows((8, 2), 2)}).ranks)
    manifests[1] = side("source", {"w": rows((8, 2), 2)}, dtype="bfloat16").ranks[1]
    with pytest.raises(LayoutError, match=r"tensor w: rank 1: .*float32.*bfloat16"):
        Manifest.of(manifests)


def test_a_hole_between_the_source_shards_is_named():
    full = side("source", {"w": rows((8, 4), 4)})
    source = Manifest.of(r if r.rank != 2 else RankManifest(2, "source", r.tensors, ()) for r in full.ranks)
    with pytest.raises(PlanError, match=r"tensor w, box \[4:6, 0:4\], target rank 4: no source rank holds it"):
        plan_transfer(source, side("target", {"w": whole((8, 4), 1, first_rank=4)}))


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_fsdp_over_tensor_parallelism(factor):
    mesh = Mesh.of(dp=2, tp=factor)
    source = Layout((13, 3), mesh, (StridedShard(0, factor), Shard(0)))
    first = len(mesh.ranks)
    for target in (rows((13, 3), 3, first_rank=first), whole((13, 3), 2, first_rank=first)):
        assert_exact(deliver(side("source", {"w": source}), side("target", {"w": target})))


def test_partial_tensors_are_refused_with_the_reason():
    with pytest.raises(LayoutError, match="got Partial \\(reduce it first\\)"):
        Layout((4,), Mesh.of(dp=2), (Partial(),))


def test_scalars_on_one_and_on_many_ranks():
    for here, there in itertools.product((1, 3), repeat=2):
        source = side("source", {"s": whole((), here)})
        delivery = deliver(source, side("target", {"s": whole((), there, first_rank=here)}))
        assert_exact(delivery)
        value = coordinate_tensor("s", (), "float32")
        assert all(torch.equal(binding.view(0), value) for binding in delivery.target.bindings.values())


def test_a_rank_of_both_roles_copies_what_it_holds_itself():
    source, target = side("source", {"w": rows((8, 3), 2)}), side("target", {"w": rows((8, 3), 2)})
    delivery = deliver(source, target)
    assert_exact(delivery)
    assert (delivery.copied_bytes, delivery.network_bytes, delivery.messages) == (8 * 3 * 4, 0, 0)
