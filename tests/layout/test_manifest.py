"""Manifests fail closed, travel as JSON, and join in any order."""

import dataclasses
import itertools
import pathlib
import pickle
import zlib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport import errors
from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import canonical_name, checkpoint_entries
from refit_transport.layout.manifest import Manifest, Opaque, Piece, PieceColumns, RankManifest, TensorSpec
from refit_transport.layout.wire import (
    ManifestReader,
    decode,
    digest,
    encode,
    manifest_from_json,
    manifest_to_json,
    part_digests,
    shared_parts,
)
from refit_transport.testing.strategies import manifest_pairs

SPEC = TensorSpec("w", (4, 4), "float32")


def manifest(rank, *, spec=SPEC, pieces=(), opaque=()):
    return RankManifest(rank, "source", (spec,), pieces, opaque)


@settings(deadline=None)
@given(manifest_pairs())
def test_json_roundtrip_is_exact(pair):
    for side in pair:
        for ranked in side.ranks:
            ranked = dataclasses.replace(ranked, opaque=(Opaque("x", "why"),))
            again = manifest_from_json(decode(encode(manifest_to_json(ranked))))
            assert again == ranked
            assert manifest_to_json(again) == manifest_to_json(ranked)


def published(manifests):
    """What the ranks of one refit publish: values, and parts by digest."""
    made = [shared_parts(ranked) for ranked in manifests]
    return [decode(encode(value)) for value, _ in made], {key: data for _, parts in made for key, data in parts.items()}


@settings(deadline=None)
@given(manifest_pairs(), st.integers(0, 2))
def test_manifests_survive_the_wire_and_parts_that_are_equal_are_one_object(pair, replicas):
    manifests = [ranked for side in pair for ranked in side.ranks]
    manifests += [dataclasses.replace(manifests[0], rank=100 + number) for number in range(replicas)]
    values, parts = published(manifests)
    assert sorted(parts) == sorted({key for value in values for key in part_digests(value)})
    reader = ManifestReader(parts)
    found = [reader.manifest(value) for value in values]
    assert found == manifests
    for a, b in itertools.pairwise(found):
        assert (a.tensors is b.tensors) == (a.tensors == b.tensors)
    assert all(copy.pieces is found[0].pieces for copy in found[len(found) - replicas :])


def test_ranks_that_only_cut_differently_publish_each_name_once():
    specs = tuple(TensorSpec(f"w{number}", (8,), "float32") for number in range(500))
    manifests = [
        RankManifest(
            rank,
            "source",
            specs,
            tuple(Piece(s.name, Box.of((2 * rank, 2 * rank + 2)), s.name, 0, (1,)) for s in specs),
        )
        for rank in range(4)
    ]
    values, parts = published(manifests)
    assert len(parts) == 3
    assert max(len(encode(value)) for value in values) < 500
    found = [ManifestReader(parts).manifest(value) for value in values]
    assert found == manifests


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def somewhere(draw, value):
    """The value with one thing in it replaced by other JSON."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        value = value.copy()
        value[key] = somewhere(draw, value[key])
        return value
    return draw(JSON)


@settings(deadline=None)
@given(st.data())
def test_whatever_comes_instead_of_a_manifest_is_a_manifest_or_one_clear_error(data):
    ranked = data.draw(manifest_pairs())[0].ranks[0]
    value = somewhere(data.draw, decode(encode(manifest_to_json(ranked))))
    with suppress(LayoutError):
        found = manifest_from_json(value)
        assert manifest_from_json(manifest_to_json(found)) == found


def test_parts_that_are_missing_changed_or_pickled_are_refused(tmp_path):
    (value,), parts = published([manifest(2, pieces=(Piece("w", SPEC.box, "b", 0, (4, 1)),))])
    key = value["rows"]
    with pytest.raises(LayoutError, match="rank 2: expected a rank manifest, got a malformed one"):
        ManifestReader({k: v for k, v in parts.items() if k != key}).manifest(value)
    with pytest.raises(LayoutError, match=f"a part of a manifest with digest {key}, got one with"):
        ManifestReader({**parts, key: parts[key] + b"x"})

    class Trap:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "sprung",)

    trap = pickle.dumps(Trap())
    with pytest.raises(LayoutError, match="a JSON message"):
        ManifestReader({**parts, digest(trap): trap}).manifest({**value, "rows": digest(trap)})
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("field", "wrong", "reason"),
    [
        ("rows", [[0], [0], [0], [0], [1]], "refers to entry 1"),
        ("rows", [[-1], [0], [0], [0], [0]], "refers to entry -1"),
        ("rows", [[0], [0], [0], [0.5], [0]], "float64"),
        ("rows", [[0], [0], [0], [0]], r"shape \(4, 1\)"),
        ("strides", [[4]], "different dims"),
        ("strides", [["4", 1]], "where integers belong"),
        ("boxes", [[[0, 4], [2, 1]]], "start <= stop"),
        ("buffers", ["b", "b"], "a buffer is listed twice"),
        ("tensors", [["w", [4, 4], "float32"]] * 2, "a tensor is listed twice"),
        ("tensors", [["w", ["4", 4], "float32"]], "where integers belong"),
        ("role", "referee", "role 'referee'"),
        ("opaque", [["w", 3]], "a name that isn't text"),
    ],
)
def test_a_malformed_manifest_is_refused_with_what_is_wrong(field, wrong, reason):
    value = decode(encode(manifest_to_json(manifest(3, pieces=(Piece("w", SPEC.box, "b", 0, (4, 1)),)))))
    with pytest.raises(LayoutError, match=f"rank 3: expected a rank manifest, got a malformed one .*{reason}"):
        manifest_from_json({**value, field: wrong})


@given(manifest_pairs())
def test_columns_are_a_sequence_of_the_same_pieces(pair):
    for ranked in (ranked for side in pair for ranked in side.ranks):
        pieces = tuple(ranked.pieces)
        columns = PieceColumns.of(pieces)
        assert (tuple(columns), len(columns), hash(columns)) == (pieces, len(pieces), hash(pieces))
        assert columns == pieces == columns
        assert [columns[index] for index in range(-len(pieces), len(pieces))] == [*pieces, *pieces]
        assert columns[1:] == pieces[1:]
        assert PieceColumns.of(columns) is columns
        # The wire counts tensors as the manifest lists them.
        turned = dataclasses.replace(ranked, tensors=ranked.tensors[::-1], pieces=columns)
        assert manifest_from_json(manifest_to_json(turned)) == turned
        again = dataclasses.replace(ranked, pieces=columns)
        assert (again, again.held()) == (ranked, ranked.held())


def test_ranks_that_declare_different_dtypes_are_refused():
    other = TensorSpec("w", (4, 4), "bfloat16")
    with pytest.raises(LayoutError, match=r"tensor w: rank 1: expected \[4, 4\] float32, got \[4, 4\] bfloat16"):
        Manifest.of([manifest(1, spec=other), manifest(0)])


def test_a_rank_that_joins_twice_is_refused():
    with pytest.raises(LayoutError, match="rank 3: expected each rank once"):
        Manifest.of([manifest(3), manifest(3)])


def test_a_piece_outside_its_tensor_is_refused():
    with pytest.raises(LayoutError, match=r"a box inside \[4, 4\], got \[0:5, 0:4\]"):
        manifest(0, pieces=(Piece("w", Box.of((0, 5), (0, 4)), "b", 0, (4, 1)),))
    pieces = (Piece("w", SPEC.box, "b", 0, (4, 1)), Piece("v", SPEC.box, "b", 0, (4, 1)))
    for same in (pieces, PieceColumns.of(pieces)):
        with pytest.raises(LayoutError, match="tensor v: rank 0: expected a tensor listed in this manifest"):
            manifest(0, pieces=same)
        small = TensorSpec("v", (4, 3), "float32")
        with pytest.raises(LayoutError, match=r"tensor v: rank 0: expected a box inside \[4, 3\]"):
            RankManifest(0, "source", (SPEC, small), same)


def test_unknown_dtype_schema_and_garbage_are_refused():
    with pytest.raises(LayoutError, match="a dtype of"):
        TensorSpec("w", (1,), "complex64")
    value = manifest_to_json(manifest(0))
    with pytest.raises(LayoutError, match="manifest schema"):
        manifest_from_json({**value, "schema": 99})
    with pytest.raises(LayoutError, match="malformed"):
        manifest_from_json({**value, "rows": [[7], [0], [0], [0], [0]]})
    with pytest.raises(LayoutError, match="a JSON message"):
        decode(b"garbage")
    with pytest.raises(LayoutError, match="a JSON message"):
        decode(zlib.compress(b"{"))
    for text in (b"[" * 100_000, zlib.compress(b"[" * 100_000)):
        with pytest.raises(LayoutError, match="a JSON message"):
            decode(text)


@given(JSON, st.integers(0, 3))
def test_what_is_encoded_comes_back_whatever_its_size(value, power):
    value = [value] * 20**power
    assert decode(encode(value)) == value


def test_tensors_are_in_natural_order():
    specs = tuple(TensorSpec(f"layers.{i}.w", (1,), "float32") for i in (10, 2, 1))
    joined = Manifest.of([RankManifest(0, "source", specs, ())])
    assert [spec.name for spec in joined.tensors] == ["layers.1.w", "layers.2.w", "layers.10.w"]


def test_checkpoint_names_and_canonical_names_are_inverse():
    spec = TensorSpec("model.layers.0.mlp.experts.down_proj.weight", (3, 4, 5), "float32")
    for index, entry in enumerate(checkpoint_entries(spec)):
        assert entry.shape == (4, 5)
        assert canonical_name(entry.name).tensor == spec.name
        assert canonical_name(entry.name).expert == index == entry.box.offset[0]


@pytest.mark.parametrize("kind", [e for e in vars(errors).values() if dataclasses.is_dataclass(e)])
def test_errors_survive_pickling_with_their_message(kind):
    if not issubclass(kind, errors.RefitTransportError) or kind.__name__.startswith("_"):
        return
    samples = {"str": "x", "int": 3, "float": 1.5}
    values = [samples.get(field.type, ()) for field in dataclasses.fields(kind)]
    error = kind(*values)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))
    assert str(error)
