"""Comparing both sides on demand: equal, changed by one bit anywhere, stale, private, tied, derived."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_session import EXPERTS, SHAPES, WORLD, Cluster, weights
from test_session import settings as refit_settings

from refit_transport.checksum import Checksums, Derived, box_checksum
from refit_transport.config.settings import RefitSettings
from refit_transport.errors import AgreementError, DeadlineError, LayoutError, TransferError, VerificationError
from refit_transport.fabrics.binding import Binding
from refit_transport.fabrics.deadline import Deadline
from refit_transport.layout.box import Box
from refit_transport.layout.manifest import Manifest, Piece, RankManifest, TensorSpec
from refit_transport.refit_plan import RefitPlan
from refit_transport.scheduling.topology import Topology
from refit_transport.session import RefitSession
from refit_transport.session_checks import SourceReading
from refit_transport.testing.oracle import HeldSide, coordinate_tensor
from refit_transport.testing.sides import HeldSource, HeldTarget
from refit_transport.testing.strategies import manifest_pairs
from refit_transport.testing.threads import run_ranks
from refit_transport.transports.base import Job
from refit_transport.verification import BoxesHere, _disjoint, compare_derived
from refit_transport.views import box_view

NORM = "model.norm.weight"


def on_every_rank(cluster, *steps, version=1):
    """One refit, then each step on one rank, and what all ranks find after it."""

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(version)
        found = []
        for number, (rank, step) in enumerate(steps):
            if channel.rank == rank:
                step()
            channel.agree(f"step/{number}", "", deadline=Deadline(20.0))
            found.append(session.compare())
        session.close()
        return found

    results = run_ranks(WORLD, rank_main)
    assert all(found == results[0] for found in results)
    return results[0]


@pytest.mark.parametrize("changes", [{"coverage": "all"}, {"coverage": "ffn"}, {"transport": "gather_broadcast"}])
def test_both_sides_are_compared_whole_without_a_refit_and_the_session_goes_on(changes):
    cluster = Cluster(refit_settings(verify="off", **changes))

    def rank_main(channel):
        session = cluster.prepare(channel)
        found = [session.compare()]
        with pytest.raises(VerificationError):
            session.verify()
        session.run(1)
        found += [session.verify(), session.verify()]
        channel.agree("compared/0", "", deadline=Deadline(20.0))
        if channel.rank == 0:
            cluster.set_version(2)
        channel.agree("trained/0", "", deadline=Deadline(20.0))
        found.append(session.compare())
        session.run(2)
        found.append(session.verify())
        return found

    results = run_ranks(WORLD, rank_main)
    assert all(found == results[0] for found in results)
    before, first, again, trained, last = results[0]
    elements = sum(weights(1)[name].numel() for name in SHAPES)
    # Two replicas of the model in bfloat16.
    assert all(found.nbytes == 2 * 2 * elements for found in results[0])
    assert first == again
    assert first.boxes == before.boxes == last.boxes > 0
    assert (first.differing, last.differing, last.version) == (0, 0, 2)
    assert before.differing > 0
    assert trained.differing == trained.boxes
    assert trained.first[0].what == "target"
    assert first.unverified == {}


@pytest.mark.parametrize("coverage", ["all", "ffn"])
def test_one_bit_on_one_rank_is_named_with_tensor_box_and_ranks(coverage):
    cluster = Cluster(refit_settings(coverage=coverage, verify="off"))
    buffer = cluster.wanted.bindings[6].buffers[EXPERTS[0]]

    def flip():
        buffer.view(torch.int16)[7] ^= 1

    broken, mended = on_every_rank(cluster, (6, flip), (6, flip))
    assert (broken.differing, mended.differing) == (1, 0)
    [found] = broken.first
    assert (found.what, found.tensor, found.rank) == ("target", EXPERTS[0], 6)
    # Element 7 of rank 6's [4, 12, 4] shard is in row 1; sources have two experts each.
    assert found.box == "[0:2, 0:12, 0:4]"
    assert found.source_rank == 0
    with pytest.raises(
        VerificationError, match=r"version 1: tensor .*up_proj.*on target rank 6 differs from source ran"
    ):
        broken.require_equal()


def test_a_source_replica_that_differs_is_named_before_what_follows_from_it():
    cluster = Cluster(refit_settings(verify="off"))

    def change():
        cluster.held.bindings[2].buffers[NORM][1] += 1

    [found] = on_every_rank(cluster, (2, change))
    assert found.differing == 1
    assert (found.first[0].what, found.first[0].source_rank, found.first[0].rank) == ("replica", 0, 2)
    with pytest.raises(AgreementError, match=r"tensor model.norm.weight, box \[0:4\]"):
        found.require_equal()


def test_private_layers_are_left_out_and_listed():
    cluster = Cluster(refit_settings(verify="off"))
    for target in cluster.targets.values():
        target.served = lambda target=target: {n: t for n, t in target.buffers().items() if n != NORM}

    def change():
        cluster.wanted.bindings[5].buffers[NORM] += 1

    [found] = on_every_rank(cluster, (5, change))
    assert found.differing == 0
    assert found.unverified.keys() == {NORM}
    assert "keeps its own layout" in found.unverified[NORM]


def test_what_arrives_whole_without_a_description_is_listed():
    cluster = Cluster(refit_settings(verify="full"), opaque={NORM: "its loader computes"})
    [found] = on_every_rank(cluster, (0, lambda: None))
    assert found.unverified == {NORM: "the target takes it whole: its loader computes"}


def test_a_derived_tensor_that_is_stale_is_named():
    cluster = Cluster(refit_settings(verify="off"))
    target, square = cluster.targets[7], {}

    def derived():
        weight = target.buffers()[NORM].float()
        yield Derived("attention.w_uk", square.setdefault("served", weight**2), weight**2)

    target.derived = derived

    def change():
        square["served"][1] += 1

    fresh, stale = on_every_rank(cluster, (7, lambda: None), (7, change))
    assert (fresh.differing, stale.differing) == (0, 1)
    with pytest.raises(
        VerificationError, match=r"attention.w_uk.*target rank 7 differs from what this rank's weights g"
    ):
        stale.require_equal()


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_refit_checks_derived_tensors_after_the_engine_has_made_them(verify):
    cluster = Cluster(refit_settings(verify=verify, timeout_s=10.0))
    stale = torch.zeros(8)
    cluster.targets[7].derived = lambda: iter([Derived("attention.w_uk", stale, stale + 1)])

    def rank_main(channel):
        session = cluster.prepare(channel)
        if verify == "off":
            session.run(1)
            return
        with pytest.raises((VerificationError, TransferError), match=r"attention.w_uk.*rank 7"):
            session.run(1)

    run_ranks(WORLD, rank_main)


def test_each_copy_of_a_tied_tensor_is_compared():
    spec = TensorSpec("w", (4, 6), "float32")
    source = Manifest.of([RankManifest(0, "source", (spec,), (Piece("w", spec.box, "w", 0, (6, 1)),))])
    pieces = (
        Piece("w", spec.box, "head", 0, (1, 4)),
        Piece("w", Box.of((0, 2), (0, 6)), "embedding", 0, (6, 1)),
        Piece("w", Box.of((2, 4), (0, 6)), "embedding", 12, (6, 1)),
    )
    target = Manifest.of([RankManifest(1, "target", (spec,), pieces)])
    held = HeldSide.of(source, {"w": coordinate_tensor("w", (4, 6), "float32")})
    wanted = HeldSide.of(target)

    def rank_main(channel):
        session = RefitSession.prepare(
            channel,
            settings=RefitSettings(coverage="all", verify="full", timeout_s=20.0) if channel.rank == 0 else None,
            source=HeldSource(held.bindings[0]) if channel.rank == 0 else None,
            target=HeldTarget(wanted.bindings[1]) if channel.rank == 1 else None,
        )
        session.run(1)
        found = [session.compare()]
        for number, buffer in enumerate(("head", "embedding")):
            if channel.rank == 1:
                wanted.bindings[1].buffers[buffer][13] += 1
            found.append(session.compare())
            if channel.rank == 1:
                wanted.bindings[1].buffers[buffer][13] -= 1
            channel.agree(f"mended/{number}", "", deadline=Deadline(20.0))
        return [part.differing for part in found]

    assert run_ranks(2, rank_main) == [[0, 1, 1]] * 2


def test_tensors_of_one_shape_that_are_swapped_are_told_apart():
    """Gate and up projections: the same places, ranks and boxes."""
    names, shape = ("gate", "up"), (4, 6)
    pieces = tuple(Piece(name, Box.full(shape), name, 0, (6, 1)) for name in names)
    specs = tuple(TensorSpec(name, shape, "float32") for name in names)
    source, target = (
        Manifest.of([RankManifest(rank, role, specs, pieces)]) for rank, role in enumerate(("source", "target"))
    )
    held = HeldSide.of(source, {name: coordinate_tensor(name, shape, "float32") for name in names})
    wanted = HeldSide.of(target)

    def rank_main(channel):
        session = RefitSession.prepare(
            channel,
            settings=RefitSettings(coverage="all", verify="full", timeout_s=20.0) if channel.rank == 0 else None,
            source=HeldSource(held.bindings[0]) if channel.rank == 0 else None,
            target=HeldTarget(wanted.bindings[1]) if channel.rank == 1 else None,
        )
        session.run(1)
        if channel.rank == 1:
            buffers = wanted.bindings[1].buffers
            buffers["gate"], buffers["up"] = buffers["up"], buffers["gate"]
        found = session.compare()
        return found.differing, {difference.tensor for difference in found.first}

    assert run_ranks(2, rank_main) == [(2, set(names))] * 2


def test_it_is_not_for_the_middle_of_a_refit():
    cluster = Cluster(refit_settings())

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.begin()
        with pytest.raises(TransferError, match="compare needs a session that is idle; this one is open"):
            session.compare()

    run_ranks(WORLD, rank_main)


def test_comparisons_leave_nothing_behind():
    cluster = Cluster(refit_settings(verify="off"))

    def rank_main(channel):
        session = cluster.prepare(channel)
        session.run(1)
        keys = []
        for number in range(6):
            session.compare()
            channel.agree(f"counted/{number}", "", deadline=Deadline(20.0))
            keys.append(channel.kept())
            channel.agree(f"next/{number}", "", deadline=Deadline(20.0))
            channel.forget([f"counted/{number - 1}", f"next/{number - 1}"])
        return keys

    keys = run_ranks(WORLD, rank_main)[0]
    assert keys[2] >= keys[5] - WORLD, keys


@given(manifest_pairs(ranks="any"), st.data())
def test_any_layouts_agree_box_by_box_and_any_changed_element_is_in_the_box_that_is_named(pair, data):
    """The checksums alone, without a channel: what sources publish against what targets find."""
    source, target = pair
    ranks = {ranked.rank for side in pair for ranked in side.ranks}
    kind = data.draw(st.sampled_from(({"coverage": "all"}, {"transport": "gather_broadcast"})))
    job = Job(source, target, Topology.of([ranks]), RefitSettings(**kind))
    tensors = {spec.name: coordinate_tensor(spec.name, spec.shape, spec.dtype) for spec in source.tensors}
    held, wanted = HeldSide.of(source, tensors), HeldSide.of(target, tensors)
    chosen = RefitPlan(job).verifier.atoms(0, share="full")

    def differing():
        here = {rank: BoxesHere.of_source(binding, chosen).checksums() for rank, binding in held.bindings.items()}
        there = {rank: BoxesHere.of_target(binding, chosen).checksums() for rank, binding in wanted.bindings.items()}
        found = []
        for atoms in chosen:
            for rank in atoms.wanters:
                for index, row in enumerate(atoms.rows):
                    copies = there[rank][atoms.number][index]
                    assert copies
                    if set(copies) != set(here[atoms.holders[0]][atoms.number][index]):
                        found.append((atoms.plan.name(row), atoms.plan.box(row), rank))
        return found

    assert differing() == []
    victims = [
        (rank, index)
        for rank, binding in wanted.bindings.items()
        for index, piece in enumerate(binding.manifest.pieces)
        if piece.box.numel
    ]
    assume(victims)
    rank, index = data.draw(st.sampled_from(victims))
    piece, view = wanted.bindings[rank].manifest.pieces[index], wanted.bindings[rank].view(index)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in view.shape)
    raw = view[place].clone().reshape(1).view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    view[place] = raw.view(view.dtype)[0]
    found = differing()
    assert found
    for name, box, at in found:
        assert (name, at) == (piece.tensor, rank)
        where = [start + offset for start, offset in zip(piece.box.offset, place, strict=True)]
        assert all(span.start <= x < span.stop for span, x in zip(box.spans, where, strict=True))


def test_derived_tensors_of_another_shape_or_dtype_differ():
    class Target:
        def derived(self):
            yield Derived("same", torch.ones(2, 3), torch.ones(2, 3))
            yield Derived("shape", torch.ones(2, 3), torch.ones(3, 2))
            yield Derived("dtype", torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16))

    found = compare_derived(Target(), 3)
    assert (found.boxes, found.differing) == (3, 2)
    assert [each.tensor for each in found.first] == ["shape", "dtype"]


SPANS = st.integers(0, 4).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 5)))


@given(st.lists(st.tuples(SPANS, SPANS), max_size=4))
def test_parts_that_overlap_count_once(cuts):
    """A source's pieces may lie over each other, with equal values in memory of their own."""
    shape = (5, 5)
    tensor, whole = coordinate_tensor("w", shape, "float32"), Box.full(shape)
    boxes = [*(Box.of(*spans) for spans in cuts), Box.of((0, 3), (0, 5)), Box.of((2, 5), (0, 5))]
    buffers = {str(number): box_view(tensor, whole, box).clone() for number, box in enumerate(boxes)}
    pieces = tuple(Piece("w", box, str(number), 0, (box.shape[1], 1)) for number, box in enumerate(boxes))
    binding = Binding.of(RankManifest(0, "source", (TensorSpec("w", shape, "float32"),), pieces), buffers)
    parts = _disjoint(binding.cover("w", whole), shape)
    assert Checksums([parts]).compute() == [box_checksum(tensor, whole, shape)]


def test_what_a_target_stages_for_its_own_layouts_is_given_up_with_the_refit():
    """Nothing that was prepared for verification keeps such memory until the next one."""
    cluster, staged = Cluster(refit_settings(verify="full")), []
    for rank, target in cluster.targets.items():
        buffers = cluster.wanted.bindings[rank].buffers

        def begin(buffers=buffers):
            memory = np.zeros(buffers[NORM].shape, np.int16)
            buffers[NORM] = torch.from_numpy(memory).view(torch.bfloat16)
            staged.append(weakref.ref(memory))

        def finish(buffers=buffers):
            buffers[NORM] = buffers[NORM].clone()

        target.private_layers = lambda: {"norm": "stage: an engine's own layout"}
        target.begin, target.finish = begin, finish
    kept = []

    def look():
        gc.collect()
        kept.append(sum(memory() is not None for memory in staged))

    on_every_rank(cluster, (0, lambda: None), (0, look))
    assert len(staged) == len(cluster.targets)
    assert kept == [0]


class SlowSource:
    """Stands where checksums are computed: never done before it is given up."""

    def __init__(self):
        self.ended = threading.Event()

    def __call__(self, is_over):
        while not is_over():
            time.sleep(0.01)
        self.ended.set()
        raise CancelledError


def test_checksums_that_are_late_or_not_wanted_any_more_are_given_up():
    source = Cluster(refit_settings()).held.bindings[0]
    slow = SlowSource()
    with pytest.raises(DeadlineError, match=r"rank 0.*its own checksums.*verify"):
        SourceReading(source, slow).result(Deadline(0.1))
    assert slow.ended.wait(10.0)
    assert SourceReading(source, lambda _: {3: [[4]]}).result(Deadline(10.0)) == {3: [[4]]}


def test_a_transfer_that_fails_is_told_before_the_sources_are_read(monkeypatch):
    cluster, slow = Cluster(refit_settings(verify="sample", timeout_s=20.0)), SlowSource()
    checksums = BoxesHere.checksums
    monkeypatch.setattr(
        BoxesHere, "checksums", lambda here, is_over=None: slow(is_over) if is_over else checksums(here)
    )

    def refuse(*_, **__):
        raise LayoutError(NORM, 0, "weights", "a refusal")

    def rank_main(channel):
        session = cluster.prepare(channel)
        for transport in session.plan.transports.values():
            transport.run = refuse
        began = time.monotonic()
        with pytest.raises((LayoutError, TransferError), match="a refusal"):
            session.run(1)
        return time.monotonic() - began

    assert max(run_ranks(WORLD, rank_main)) < 10.0
    assert slow.ended.wait(10.0)
