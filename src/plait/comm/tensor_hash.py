"""A number that stands for the bits of a tensor, and the comparison of what all ranks must have alike.

With `w` the tensor's bytes as 64-bit words, and odd numbers `k` and `c`, all modulo 2^64:

    mixed = k w                                 a difference reaches the bits above it
    fold  = mixed xor (mixed >> 32)             and those below
    sums  = Σ fold[i] c[i] over each row        according to where it stands
    hash  = the same of the sums, row by row, until one word is left

A word that differs always gives another hash, for each step can be undone. Several words that differ give the
same one by chance only, at worst (where nothing but signs differ) once in some 2^32 times.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from plait.comm.buffers import describe
from plait.comm.consistency_check import HEADER_BYTES, require_same_text
from plait.comm.group import Group

_ROW = 2**12
"""Words that have constants of their own."""
_WORD = 8
"""Bytes."""
_UNSIGNED = 2**64
_MIXING = 0x5851F42D4C957F2D
"""Odd (Knuth's multiplier for a linear congruential generator modulo 2^64)."""


def tensor_hash(tensor: Tensor) -> Tensor:
    """A hash of the bytes of `tensor`, of any dtype, shape and strides: int64, 0-d, on its device.

    What is a number or none matters not, only bits do; zeros of both signs differ. The device is not waited
    for, and hashes are the same on all devices.
    """
    words = _words(tensor)
    constants = _constants(words.device)
    words = _sums(words, constants)
    while len(words) > 1:
        words = _sums(words, constants)
    return words.sum()  # of one word, or of none


def as_hex(number: Tensor) -> str:
    """A hash as text; the device is waited for."""
    return f"{int(number) % _UNSIGNED:016x}"


def require_same_bits(tensor: Tensor, group: Group, doing: str) -> None:
    """In a guarded group: refuse, on every rank, a `tensor` that is not the same on all of them.

    `doing` completes "ranks 0, 1: …". Nothing is done for the meta device. Communication: 256 bytes, counted
    as `guard`; it waits for all ranks and for the device. Raises `CommunicationError` that says which ranks
    have which dtype, shape and bits.
    """
    if not group.guarded or group.transport is None or tensor.is_meta:
        return
    require_same_text(
        f"{doing} {describe(tensor)} of bits {as_hex(tensor_hash(tensor))}", group, tensor.device
    )
    group.traffic.record(group.name, "guard", HEADER_BYTES)


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int64, with zeros behind them where they fill no word."""
    # A copy where need be; one element or none may be taken for dense whatever the strides are.
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    missing = -len(flat) % _WORD
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.storage_offset() % _WORD:
        flat = flat.clone()
    return flat.view(torch.int64)


def _sums(words: Tensor, constants: Tensor) -> Tensor:
    """One word for each row of words; the last may be shorter."""
    whole = len(words) // _ROW * _ROW
    # On a processor a block that stays in the cache, on others one that keeps them busy.
    block = _ROW * (16 if words.device.type == "cpu" else 1024)
    parts, rest = torch.split(words[:whole], block), words[whole:]
    sums = [_weighted(part.view(-1, _ROW), constants).sum(1) for part in parts]
    sums.append(_weighted(rest, constants[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums if len(rest) else sums[:-1])


def _weighted(words: Tensor, constants: Tensor) -> Tensor:
    mixed = words * _MIXING
    # torch shifts with the sign; the mask takes it away.
    return (mixed >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(mixed).mul_(constants)


@cache
def _constants(device: torch.device) -> Tensor:
    """Odd numbers for the words of a row, from a counter (the mixing of SplitMix64, Steele et al. 2014)."""
    numbers = []
    for place in range(1, _ROW + 1):
        mixed = place * 0x9E3779B97F4A7C15 % _UNSIGNED
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % _UNSIGNED
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % _UNSIGNED
        mixed = (mixed ^ mixed >> 31) | 1
        numbers.append(mixed - _UNSIGNED if mixed >> 63 else mixed)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
