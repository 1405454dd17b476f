"""Comparisons that the Megatron tests share."""

from __future__ import annotations

import numpy as np
from megatron_ranks import Outcome, Snapshot

from refit_transport.layout.canonical import checkpoint_entries
from refit_transport.layout.manifest import Manifest
from refit_transport.layout.presets.model import LogicalModel
from refit_transport.sources.naming import check_complete, expected_tensors


def assemble(snapshots: list[Snapshot], manifest: Manifest) -> dict[str, np.ndarray]:
    """The checkpoint tensors that the pieces give, each box checked against every holder."""
    whole = {spec.name: np.full(spec.shape, np.nan, np.float32) for spec in manifest.tensors}
    for snapshot in snapshots:
        for piece, values in zip(snapshot.manifest.pieces, snapshot.pieces, strict=True):
            place = whole[piece.tensor][tuple(slice(span.start, span.stop) for span in piece.box.spans)]
            known = ~np.isnan(place)
            assert np.array_equal(place[known], values[known]), f"holders of {piece.tensor}{piece.box} differ"
            place[...] = values
    found = {}
    for spec in manifest.tensors:
        assert not np.isnan(whole[spec.name]).any(), f"{spec.name} is not covered"
        for entry in checkpoint_entries(spec):
            stored = whole[spec.name] if entry.expert is None else whole[spec.name][entry.expert]
            found[entry.name] = stored.reshape(entry.shape)
    return found


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Bit for bit, the same names."""
    assert sorted(got) == sorted(want)
    different = [name for name in want if not np.array_equal(got[name], want[name])]
    assert not different, f"{len(different)} of {len(want)} differ: {different[:5]}"


def check_weights(outcomes: list[Outcome], model: LogicalModel, *, dtype: str) -> dict[str, dict[str, np.ndarray]]:
    """At each stage, the pieces of all ranks are the hand-written export; returns them by stage."""
    tensors = {}
    for stage in outcomes[0].snapshots:
        snapshots = [outcome.snapshots[stage] for outcome in outcomes]
        manifest = Manifest.of(snapshot.manifest for snapshot in snapshots)
        check_complete(manifest, model)
        assert all(snapshot.padding == 0 for snapshot in snapshots)
        assert set(manifest.tensors) == set(expected_tensors(model, dtype=dtype))
        oracle = {name: value for snapshot in snapshots for name, value in snapshot.exported.items()}
        tensors[stage] = assemble(snapshots, manifest)
        assert_same(tensors[stage], oracle)
    return tensors
