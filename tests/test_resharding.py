"""`reshard` alone: DTensors and local tensors between any two layouts, on any ranks; torch says what is right."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import reshard_ranks
import torch
from forked_ranks import run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from reshard_ranks import Case, Side
from torch.distributed.tensor import Replicate, Shard

from refit_transport import Layout, LayoutError, Local, Mesh, RefitSettings, Resharder, Topology, TransferError, reshard
from refit_transport.errors import RefitTransportError
from refit_transport.layout import placement as ours
from refit_transport.testing.strategies import layouts, local_memories, meshes, shapes
from refit_transport.testing.threads import run_ranks

WORLD = 5


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(WORLD)
    yield pool
    pool.close()


@st.composite
def sides(draw, shape, mesh, dtype):
    layout = draw(layouts(shape, mesh))
    blocks = any(isinstance(placement, ours.BlockShard) for placement in layout.placements)
    memory = {rank: draw(local_memories(layout.local_shape(rank))) for rank in mesh.ranks}
    return Side(layout, "local" if blocks else draw(st.sampled_from(("dtensor", "local"))), dtype, memory)


@st.composite
def cases(draw):
    there, here = (draw(meshes(pool=range(WORLD), most_ranks=WORLD)) for _ in range(2))
    dtypes = draw(st.sampled_from([("float32", "bfloat16"), ("float16", "float32"), ("uint8", "uint8")]))
    tensors = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        shape = draw(shapes())
        tensors[name] = draw(sides(shape, there, dtypes[0])), draw(sides(shape, here, dtypes[1]))
    return Case(
        tensors,
        draw(st.none() | topologies()),
        draw(st.sampled_from(("off", "full"))),
        draw(st.sampled_from(("auto", "off"))),
    )


@st.composite
def topologies(draw):
    domain_of = draw(st.lists(st.integers(0, WORLD - 1), min_size=WORLD, max_size=WORLD))
    domains = [[rank for rank in range(WORLD) if domain_of[rank] == number] for number in range(WORLD)]
    return Topology.of(domains, nics=draw(st.sampled_from(("domain", "rank"))))


@settings(max_examples=30)
@given(cases())
def test_any_layout_becomes_any_other_on_any_ranks(ranks, case):
    assert ranks.run(reshard_ranks.any_case, case=case) == [[]] * WORLD


@pytest.mark.parametrize(
    ("meshes", "placements"),
    [
        (([0, 1], [2, 3, 4]), ([Shard(0)], [Shard(1)])),
        (([0, 1, 2], [0, 2, 4]), ([Shard(1)], [Shard(0)])),
        (([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([Shard(0)], [Shard(1)])),
        (([[0, 1], [2, 3]], [[1, 3], [2, 4]]), ([Replicate(), Shard(0)], [Shard(0), Shard(0)])),
        (([3], [0, 1, 2, 3, 4]), ([Replicate()], [Replicate()])),
    ],
    ids=["disjoint", "overlapping", "equal", "2-D", "to replicas"],
)
# Ranks ascend on each axis: torch's own collectives order what they gather by rank, whatever the mesh's order.
def test_torch_gathers_from_the_target_what_it_gathers_from_the_source(ranks, meshes, placements):
    assert all(ranks.run(reshard_ranks.torchs_own_words, ranks=meshes, placements=placements))


def test_parameters_and_whole_tensors_of_state_dicts(ranks):
    assert all(ranks.run(reshard_ranks.modules))


@pytest.mark.parametrize(
    ("domains", "nics", "network"),
    [
        # Ranks 1 and 2 each want 3 rows of rank 0, and rank 2 wants 3 of rank 1; 4 floats in each.
        (((0,), (1,), (2,), (3, 4)), "domain", 3 * 48),
        (((0, 1, 2, 3, 4),), "domain", 0),
        (((0, 1), (2, 3), (4,)), "domain", 2 * 48),
        (((0,), (1, 2), (3, 4)), "domain", 2 * 48),
        # The NICs of ranks 3 and 4 would be free to relay for rank 2, but these ranks have no part.
        (((0,), (1,), (2, 3, 4)), "rank", 3 * 48),
    ],
)
def test_one_preparation_serves_many_runs_and_bytes_follow_the_topology(ranks, domains, nics, network):
    found = ranks.run(reshard_ranks.repeated, topology=Topology.of(domains, nics=nics), versions=4)
    assert found[0] == [(network, ["source", "both", "target", "none", "none"])] * 4
    assert found[1:] == [[]] * (WORLD - 1)


def test_hosts_are_the_domains_unless_a_topology_is_given(ranks):
    assert ranks.run(reshard_ranks.repeated, topology=None, versions=1)[0][0][0] == 0


def test_a_subgroup_goes_by_global_ranks(ranks):
    assert all(ranks.run(reshard_ranks.in_subgroup))


def test_ranks_that_hold_nothing_plan_nothing(ranks):
    assert all(ranks.run(reshard_ranks.idle_ranks_plan_nothing))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hole", r"tensor tensor, box \[4:6, \d:\d\], target rank \d: no source rank holds it"),
        ("missing name", r"tensor v: expected a tensor that the source has"),
        ("other dtype", r"tensor tensor: rank 1: expected \[6, 8\] float32, got \[6, 8\] float16"),
        ("inconvertible", r"tensor tensor: expected the source's dtype float32, got int64"),
        ("other shape", r"tensor tensor: rank 0: expected a local shape \[3, 8\] .*got \[2, 8\]"),
        (
            "no dst",
            r"tensor tensor: rank 2: expected a dst on every rank of its mesh, \[1, 2\], got rank 2, which gave",
        ),
        ("no src", r"at least one source and one target rank"),
        ("no tensor", r"tensor w: expected a DTensor, a Local or a tensor, got int"),
        ("not in mesh", r"tensor tensor: rank 4: expected a rank of the layout's mesh, \[0, 1\], got 4"),
        ("alias", r"tensor tensor: rank 1: expected a target in memory of its own, got the memory of source tensor"),
        ("late", r"no answer from rank 3"),
        ("in transfer", r"the cable is cut"),
    ],
)
def test_one_cause_on_every_rank_and_the_group_goes_on(ranks, fault, words):
    found = ranks.run(reshard_ranks.refused, fault=fault)
    for kind, message, seconds, works in found:
        assert kind in {"LayoutError", "PlanError", "TransferError", "DeadlineError"}, found
        assert re.search(words, message), found
        assert seconds < 15.0
        assert works


def test_many_calls_leave_nothing_behind(ranks):
    # What earlier calls left to a thread that ends may go meanwhile.
    assert all(max(found) <= 0 for found in ranks.run(reshard_ranks.leftovers, calls=5))


def test_a_control_channel_needs_no_process_group():
    rows, columns = (Layout((4, 4), Mesh.of(tp=2), (ours.Shard(dim),)) for dim in (0, 1))
    full = torch.arange(16.0).view(4, 4)

    def rank_main(channel):
        dst = Local(torch.zeros(4, 2), columns)
        reshard(Local(full.chunk(2)[channel.rank], rows), dst, group=channel)
        assert torch.equal(dst.tensor, full.chunk(2, 1)[channel.rank])

    run_ranks(2, rank_main)


def test_a_lone_process_without_a_group_is_told_so():
    with pytest.raises(TransferError, match=r"no process group: initialize it, or give a control channel"):
        reshard(torch.zeros(1), torch.zeros(1))


def test_a_rank_that_dies_is_missed_by_all_others():
    rows, columns = (Layout((4, 6), Mesh.of(tp=3), (ours.Shard(dim),)) for dim in (0, 1))

    def rank_main(channel):
        src = Local(torch.zeros(rows.local_shape(channel.rank)), rows)
        dst, settings = Local(torch.zeros(4, 2), columns), RefitSettings(timeout_s=3.0)
        resharder = Resharder.prepare(src, dst, group=channel, settings=settings)
        resharder.run()
        if channel.rank == 1:
            os._exit(1)
        with pytest.raises(RefitTransportError, match=r"rank 1(,| in) phase"):
            resharder.run()
        with pytest.raises(TransferError, match="this one is broken"):
            resharder.run()
        return "missed"

    assert run_forked(3, rank_main, lost={1}) == ["missed", None, "missed"]


def test_storage_that_moves_between_runs_is_followed_but_not_into_the_other_side():
    def rank_main(channel):
        src, dst = torch.ones(3), torch.zeros(3)
        with Resharder.prepare(src, dst, group=channel) as resharder:
            resharder.run()
            src.data, dst.data = torch.full((3,), 2.0), torch.zeros(3)
            resharder.run()
            assert dst.tolist() == [2, 2, 2]
            dst.data = src.data
            with pytest.raises(LayoutError, match="got the memory of source tensor"):
                resharder.run()

    run_ranks(1, rank_main)


def test_settings_that_name_another_transport_or_coverage_do_not_count():
    def rank_main(channel):
        dst = torch.zeros(3)
        reshard(torch.ones(3), dst, group=channel, settings=RefitSettings(transport="gather_broadcast"))
        assert dst.tolist() == [1, 1, 1]

    run_ranks(1, rank_main)
