"""A hash of the bits of a tensor, and the check that a tensor is the same on all ranks.

With `w` the tensor's bytes as 64-bit words, and odd numbers `k` and `c`, all modulo 2^64:

    mixed = k w                                 a difference reaches the bits above it
    fold  = mixed xor (mixed >> 32)             and the bits below it
    sums  = Σ fold[i] c[i] over each row        weighted by position
    hash  = the same of the sums, row by row, until one word is left

Tensors that differ in one word always have different hashes, since each step is invertible. Tensors that
differ in several words collide by chance only, at worst (where only signs differ) once in some 2^32 times.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from plait.ranks.consistency_check import HEADER_BYTES, require_same_text
from plait.ranks.group import Group
from plait.ranks.transport.buffers import describe

_ROW = 2**12
"""Words with different constants."""
_WORD_BYTES = 8
_UNSIGNED = 2**64
_MIXING = 0x5851F42D4C957F2D
"""Odd (Knuth's multiplier for a linear congruential generator modulo 2^64)."""


def tensor_hash(tensor: Tensor) -> Tensor:
    """Return a hash of the bytes of `tensor`, of any dtype, shape and strides: int64, 0-d, on its device.

    Only bits count: NaNs are compared too, and zeros of both signs differ. The device is not synchronised,
    and hashes are the same on all devices.
    """
    words = _words(tensor)
    constants = _constants(words.device)
    words = _sums(words, constants)
    while len(words) > 1:
        words = _sums(words, constants)
    return words.sum()  # of one word, or of none


def as_hex(number: Tensor) -> str:
    """Return a hash as 16 hexadecimal digits. Synchronises the device."""
    return f"{int(number) % _UNSIGNED:016x}"


def require_same_bits(tensor: Tensor, group: Group, doing: str) -> None:
    """Raise on every rank if the bits of `tensor` differ between ranks; skipped if `group.guarded` is False.

    `doing` completes "ranks 0, 1: …". Tensors on the meta device are skipped. Communication: 256 bytes,
    counted as `guard`; blocks until all ranks have called it, and synchronises the device. Raises
    `CommunicationError` with the dtype, shape and hash on each rank.
    """
    if not group.guarded or group.transport is None or tensor.is_meta:
        return
    require_same_text(
        f"{doing} {describe(tensor)} of bits {as_hex(tensor_hash(tensor))}", group, tensor.device
    )
    group.traffic.record(group.name, "guard", HEADER_BYTES)


def _words(tensor: Tensor) -> Tensor:
    # A copy only where needed; a tensor of one element or none counts as contiguous whatever its strides.
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    missing = -len(flat) % _WORD_BYTES
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)


def _sums(words: Tensor, constants: Tensor) -> Tensor:
    """Return the weighted sum of each row of `_ROW` words, as int64; the last row may be shorter."""
    whole = len(words) // _ROW * _ROW
    # On a CPU a block that stays in the cache, on a GPU one that fills it.
    block = _ROW * (16 if words.device.type == "cpu" else 1024)
    parts, rest = torch.split(words[:whole], block), words[whole:]
    sums = [_weighted(part.view(-1, _ROW), constants).sum(1) for part in parts]
    sums.append(_weighted(rest, constants[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums if len(rest) else sums[:-1])


def _weighted(words: Tensor, constants: Tensor) -> Tensor:
    mixed = words * _MIXING
    # torch shifts the sign bit in; the mask removes it.
    return (mixed >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(mixed).mul_(constants)


@cache
def _constants(device: torch.device) -> Tensor:
    """Return odd constants that multiply the words of a row, from SplitMix64 (Steele et al. 2014)."""
    numbers = []
    for position in range(1, _ROW + 1):
        mixed = position * 0x9E3779B97F4A7C15 % _UNSIGNED
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % _UNSIGNED
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % _UNSIGNED
        mixed = (mixed ^ mixed >> 31) | 1
        numbers.append(mixed - _UNSIGNED if mixed >> 63 else mixed)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
