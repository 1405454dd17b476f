"""Writes and reads a source's weights by logical place, for tests and demos: changes that every layout agrees on."""

from __future__ import annotations

import hashlib

import torch

from refit_transport.layout.box import Box
from refit_transport.layout.manifest import TensorSpec
from refit_transport.sources.megatron import MegatronSource
from refit_transport.views import piece_view

# Large enough to move every log-probability far beyond rounding, small enough to keep a model trainable.
_SCALE = 0.1
_SHIFT = 0.01


def perturb(source: MegatronSource, *, rank: int, seed: int) -> None:
    """Adds to each logical element a pseudo-random amount in proportion to it, and a little more."""
    manifest, buffers = source.manifest(rank), source.buffers()
    specs = {spec.name: spec for spec in manifest.tensors}
    with torch.no_grad():
        for piece in manifest.pieces:
            view = piece_view(piece, buffers)
            noise = element_noise(specs[piece.tensor], piece.box, seed=seed).to(view.device)
            view.copy_(view.float() * (1 + _SCALE * noise) + _SHIFT * noise)
    source.write_back()


def element_noise(spec: TensorSpec, box: Box, *, seed: int) -> torch.Tensor:
    """fp32 numbers in [-1, 1), shaped as the box; each depends only on seed, tensor name and global coordinates.

    >>> spec = TensorSpec("w", (4, 6), "float32")
    >>> whole = element_noise(spec, spec.box, seed=1)
    >>> bool((element_noise(spec, Box.of((1, 3), (2, 5)), seed=1) == whole[1:3, 2:5]).all())
    True
    """
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=4).digest(), "little")
    flat = torch.zeros((), dtype=torch.int64)
    for span, size in zip(box.spans, spec.shape, strict=True):
        flat = (flat * size).unsqueeze(-1) + torch.arange(span.start, span.stop)
    mixed = flat + key
    # Three rounds of multiply and shift (32-bit finaliser constants): neighbours get unrelated numbers.
    for factor in (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0xFFFFFFFF
    # The upper 24 bits, as many as fp32 holds exactly: the low ones of a product are poorly mixed.
    return (mixed >> 8).float() / 0x800000 - 1


def piece_digests(source: MegatronSource, *, rank: int) -> dict[str, str]:
    """A digest of the bytes of each piece, by tensor and box."""
    buffers = source.buffers()
    return {
        f"{piece.tensor}{piece.box}": hashlib.blake2b(
            piece_view(piece, buffers).contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for piece in source.manifest(rank).pieces
    }
