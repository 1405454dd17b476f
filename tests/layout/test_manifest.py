"""Manifests fail closed, travel as JSON, and join in any order."""

import dataclasses
import pickle
import zlib

import pytest
from hypothesis import given, settings

from refit_transport import errors
from refit_transport.errors import LayoutError
from refit_transport.layout.box import Box
from refit_transport.layout.canonical import canonical_name, checkpoint_entries
from refit_transport.layout.manifest import Manifest, Opaque, Piece, RankManifest, TensorSpec
from refit_transport.layout.wire import decode, encode, manifest_from_json, manifest_to_json
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
            assert manifest_from_json(decode(encode(manifest_to_json(ranked)))) == ranked


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


def test_unknown_dtype_schema_and_garbage_are_refused():
    with pytest.raises(LayoutError, match="a dtype of"):
        TensorSpec("w", (1,), "complex64")
    value = manifest_to_json(manifest(0))
    with pytest.raises(LayoutError, match="manifest schema"):
        manifest_from_json({**value, "schema": 99})
    with pytest.raises(LayoutError, match="malformed"):
        manifest_from_json({**value, "rows": [[7], [0], [0], [0], [0]]})
    with pytest.raises(LayoutError, match="compressed JSON"):
        decode(b"garbage")
    with pytest.raises(LayoutError, match="compressed JSON"):
        decode(zlib.compress(b"{"))


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
