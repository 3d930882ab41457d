"""Checks that all ranks of a group make the same call, and that a tensor has the same bits on all of them.

A backend does not check. When sizes differ Gloo ends the process, without an exception that could be caught;
other differences give wrong numbers or a hang. So the ranks first exchange a description of the call: a hash
of its text, and as much of the text as fits into a fixed size. Only where hashes differ, and a text is
longer, do they exchange more: the part in which the texts differ.

With `w` the tensor's bytes as 64-bit words, and odd numbers `k` and `c`, all modulo 2^64:

    mixed = k w                                 a difference reaches the bits above it
    fold  = mixed xor (mixed >> 32)             and the bits below it
    sums  = Σ fold[i] c[i] over each row        weighted by position
    hash  = the same of the sums, row by row, until one word is left

Tensors that differ in one word always have different hashes, since each step is invertible. Tensors that
differ in several words collide by chance only, at worst (where only signs differ) once in some 2^32 times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.transport.call_description import describe, shown
from plait.ranks.transport.interface import Pending, RangeSizes, Transport

HEADER_BYTES = 256
_DIGEST_BYTES, _LENGTH_BYTES = 16, 4
_FITS = HEADER_BYTES - _DIGEST_BYTES - _LENGTH_BYTES
"""Bytes of a text that a header has room for."""
_CONTEXT = 60
"""Bytes of a long line that are shown before the first difference."""
SAME_CALL = "make the same call with the same shapes on each"
SIZE_BYTES = 16
"""Bytes that each rank passes to the check of range sizes, for each rank of the group."""


def require_same_text(
    text: str, group: Group, device: torch.device, *, doing: str = "", remedy: str = SAME_CALL
) -> None:
    """Block until all ranks of `group` call this; raise on all of them unless their `text` is the same.

    Communication: one all-gather of 256 bytes per rank over the group, not counted as traffic; on CUDA
    without Gloo it synchronises the host. Raises `CommunicationError` on every rank, with each rank's text:
    of one that is longer than 236 bytes the line, or the part of it, in which the texts differ first.
    `doing` names the call for these, and `remedy` says how to mend it.
    """
    versions = different_texts(text, group, device, about=doing)
    if versions:
        call = f"{doing}; " if doing else ""
        raise CommunicationError(
            f"the ranks of {group.name} do not agree ({call}{shown(versions)}): {remedy}."
        )


def different_texts(
    text: str, group: Group, device: torch.device, *, about: str = "", optional: bool = False
) -> dict[str, list[int]]:
    """Return, on every rank, which ranks have which `text`; empty if all ranks have the same.

    Of long texts that part which differs: see `require_same_text`, whose communication it has; where they
    differ, also a broadcast of the first text and 264 bytes a rank. With `optional` a rank without a text
    is not counted. `about` names the call for errors of the exchange, in place of the text.
    """
    transport = group.transport
    if transport is None:
        return {}
    mine = _as_tensor(_encode(text), group.device_for_text(device))
    rows = _all_gather(mine, about or text[:_FITS], group, transport)
    headers = [bytes(row.tolist()) for row in rows]
    counted = [index for index, header in enumerate(headers) if not optional or _length(header)]
    if len({headers[index] for index in counted}) < 2:
        return {}
    if max(map(_length, headers)) <= _FITS:
        parts = [header[_DIGEST_BYTES + _LENGTH_BYTES :].rstrip(b"\0") for header in headers]
    else:
        parts = _differing_parts(text.encode(), counted, _length(headers[counted[0]]), group, device)
    versions: dict[str, list[int]] = {}
    for index in counted:
        part = parts[index].decode(errors="replace") or "nothing"
        versions.setdefault(part, []).append(group.ranks[index])
    return versions


def require_matching_sizes(sizes: RangeSizes, call: str, group: Group, device: torch.device) -> None:
    """Block until all ranks of `group` call this; raise unless sent sizes are those receivers expect.

    `call` describes the operation. Communication: one all-gather of `SIZE_BYTES * group.size` per rank, as
    that of `require_same_text`. Raises `CommunicationError` on every rank, with the first sizes that differ.
    """
    if group.transport is None:
        return
    mine = torch.tensor(sizes[:2], dtype=torch.int64, device=group.device_for_text(device))
    sent, received = _all_gather(mine, call, group, group.transport).unbind(1)
    wrong = (sent != received.t()).nonzero().tolist()
    if wrong:
        source, destination = wrong[0]
        number, expected = sent[source, destination].item(), received[destination, source].item()
        pair = f"rank {group.ranks[source]} sends {number} elements to rank {group.ranks[destination]}"
        raise CommunicationError(
            f"the ranks of {group.name} do not agree ({call}: {pair}, which expects {expected}): give the "
            "same size on both."
        )


def all_numbers(number: int, group: Group, device: torch.device, about: str) -> list[int]:
    """Return on every rank the list of all ranks' `number`; `about` names the call, for errors.

    Communication: one all-gather of 8 bytes a rank, as that of `require_same_text`.
    """
    if group.transport is None:
        return [number]
    mine = torch.tensor([number], device=group.device_for_text(device))
    numbers: list[int] = _all_gather(mine, about, group, group.transport).flatten().tolist()
    return numbers


def _differing_parts(
    mine: bytes, counted: list[int], length: int, group: Group, device: torch.device
) -> list[bytes]:
    """Return, on every rank, the part of each rank's text around the first byte in which any two differ.

    `length`: of the text of the first rank that is `counted`, with which the others compare theirs.
    """
    transport, source = group.transport, counted[0]
    assert transport is not None
    device = group.device_for_text(device)
    first = _as_tensor(mine if group.index == source else bytes(length), device)
    _wait(partial(transport.broadcast, first, source), "a text that ranks compare", group)
    pairs = enumerate(zip(mine, bytes(first.tolist()), strict=False))
    common = next((place for place, (one, other) in pairs if one != other), min(len(mine), length))
    differs = group.index in counted and (common < length or len(mine) > length)
    begins = torch.tensor([common if differs else length + 1], device=device)
    begin = int(_all_gather(begins, "where texts differ", group, transport).min())
    part = _as_tensor(_part(mine, begin).ljust(HEADER_BYTES, b"\0"), device)
    rows = _all_gather(part, "the parts that differ", group, transport)
    return [bytes(row.tolist()).rstrip(b"\0") for row in rows]


def _part(text: bytes, begin: int) -> bytes:
    """Return the line of `text` that byte `begin` is in; of one that does not fit, the part around `begin`.

    The name of what such a line describes, before the first " = ", is kept.
    """
    start = text.rfind(b"\n", 0, begin) + 1
    line = text[start:].partition(b"\n")[0]
    if len(line) <= HEADER_BYTES:
        return line
    name, equals, _ = line[:_CONTEXT].partition(b" = ")
    first = max(0, begin - start - _CONTEXT)
    before = (name + equals if equals else b"") + b"... " if first else b""
    shown = line[first:][: HEADER_BYTES - len(before) - 4]
    return before + shown + (b" ..." if first + len(shown) < len(line) else b"")


def _all_gather(mine: Tensor, call: str, group: Group, transport: Transport) -> Tensor:
    """Return the tensors that all ranks compare for `call`, stacked by index, on the CPU."""
    everyone = mine.new_empty(group.size, *mine.shape)
    _wait(partial(transport.all_gather, mine, everyone), call, group)
    return everyone.cpu()


def _wait(start: Callable[[], Pending], call: str, group: Group) -> None:
    ranks = ", ".join(map(str, group.ranks))
    awaited = f"the consistency check of {call} over {group.name} with ranks {ranks}"
    Handle(start, lambda: None, awaited, group).wait()


def _as_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _encode(text: str) -> bytes:
    """Return a text's digest and length in bytes, then as much of it as fits into `HEADER_BYTES`."""
    data = text.encode()
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    header = digest + len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return header[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")


def _length(header: bytes) -> int:
    """Return the length in bytes of a rank's text, from its fixed-size header."""
    return int.from_bytes(header[_DIGEST_BYTES:][:_LENGTH_BYTES], "little")


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
