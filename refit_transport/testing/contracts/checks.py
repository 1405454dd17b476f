"""Checks of manifests and buffers that the suites of both sides share; AssertionErrors say what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from refit_transport.layout.manifest import RankManifest, Role
from refit_transport.testing.oracle import box_of
from refit_transport.views import piece_view, torch_dtype


def check_manifest(manifest: RankManifest, *, rank: int, role: Role) -> None:
    """The manifest is the asked rank's and role's, and lists each tensor once."""
    assert manifest.rank == rank, f"manifest(rank={rank}) describes rank {manifest.rank}"
    assert manifest.role == role, f"the manifest's role is {manifest.role!r}, expected {role!r}"
    twice = [name for name, count in Counter(spec.name for spec in manifest.tensors).items() if count > 1]
    assert not twice, f"listed more than once: {twice}"


def check_pieces(manifest: RankManifest, buffers: Mapping[str, torch.Tensor]) -> None:
    """Every piece points into a buffer that is there, has the declared dtype and contains the whole piece."""
    dtypes = {spec.name: torch_dtype(spec.dtype) for spec in manifest.tensors}
    for piece in manifest.pieces:
        what = f"{piece.tensor}{piece.box}"
        assert piece.buffer in buffers, f"{what} lies in buffer {piece.buffer!r}, which buffers() doesn't have"
        buffer = buffers[piece.buffer]
        found = str(buffer.dtype).removeprefix("torch.")
        assert buffer.dtype == dtypes[piece.tensor], f"{what} is declared {dtypes[piece.tensor]}, its buffer is {found}"
        if 0 not in piece.box.shape:
            reach = sum((size - 1) * stride for size, stride in zip(piece.box.shape, piece.strides, strict=True))
            room = buffer.untyped_storage().nbytes() // buffer.element_size() - buffer.storage_offset()
            assert piece.offset >= 0, f"{what} begins before its buffer"
            assert piece.offset + reach < room, (
                f"{what} ends {piece.offset + reach + 1 - room} elements behind its buffer"
            )


def check_apart(manifest: RankManifest, buffers: Mapping[str, torch.Tensor]) -> None:
    """No two pieces of one tensor share memory: what one receives, the other would overwrite."""
    taken: dict[tuple[int, int], str] = {}
    for piece in manifest.pieces:
        size = buffers[piece.buffer].element_size()
        view = piece_view(piece, buffers)
        storage = view.untyped_storage().data_ptr()
        index = torch.arange(view.untyped_storage().nbytes() // size)
        places = index.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()
        assert len(set(places)) == len(places), f"{piece.tensor}{piece.box}: two of its elements share memory"
        for place in places:
            other = taken.setdefault((storage, place * size), f"{piece.tensor}{piece.box}")
            assert other.partition("[")[0] != piece.tensor or other == f"{piece.tensor}{piece.box}", (
                f"{piece.tensor}{piece.box} shares memory with {other}"
            )


def check_values(
    manifest: RankManifest, buffers: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Every piece holds its box of these full tensors, to the bit."""
    missing = {spec.name for spec in manifest.tensors} - tensors.keys()
    assert not missing, f"the manifest has tensors that the suite was given no values of: {sorted(missing)}"
    for spec in manifest.tensors:
        assert tuple(tensors[spec.name].shape) == spec.shape, (
            f"{spec.name} is declared {list(spec.shape)}, it is {list(tensors[spec.name].shape)}"
        )
    for piece in manifest.pieces:
        view = piece_view(piece, buffers)
        expected = box_of(tensors[piece.tensor], piece.box.offset, piece.box.shape).to(view.dtype)
        wrong = int((view != expected).sum())
        assert not wrong, f"{piece.tensor}{piece.box}: {wrong} of {view.numel()} elements are others than the tensor's"


def same_values(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, when: str) -> None:
    """Both have the same names, and tensors of the same bits under them."""
    assert found.keys() == expected.keys(), f"{when}: {_names(found)} instead of {_names(expected)}"
    for name, tensor in expected.items():
        got = found[name]
        assert got.dtype == tensor.dtype, f"{when}: {name} is {got.dtype} instead of {tensor.dtype}"
        assert got.shape == tensor.shape, f"{when}: {name} is {list(got.shape)} instead of {list(tensor.shape)}"
        wrong = int((got != tensor).sum())
        assert not wrong, f"{when}: {name}: {wrong} of {tensor.numel()} elements differ"


def _names(names: Iterable[str]) -> list[str]:
    return sorted(names)
