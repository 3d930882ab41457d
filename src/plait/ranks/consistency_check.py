"""Consistency check before a collective: all ranks of the group must make the same call.

A backend does not check. When sizes differ Gloo ends the process, without an exception that could be caught;
other differences give wrong numbers or a hang. So the ranks first exchange a description of the call: a hash
of its text, and as much of the text as fits into a fixed size. Only where hashes differ, and a text is
longer, do they exchange more: the part in which the texts differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.transport.interface import Pending, PieceSizes, Transport

HEADER_BYTES = 256
_DIGEST_BYTES, _LENGTH_BYTES = 16, 4
_FITS = HEADER_BYTES - _DIGEST_BYTES - _LENGTH_BYTES
"""Bytes of a text that a header has room for."""
_CONTEXT = 60
"""Bytes of a long line that are shown before the first difference."""
SAME_CALL = "make the same call with the same shapes on each"
SIZE_BYTES = 16
"""Bytes that each rank passes to the check of piece sizes, for each rank of the group."""


def require_same_text(
    text: str, group: Group, device: torch.device, *, doing: str = "", remedy: str = SAME_CALL
) -> None:
    """Block until all ranks of `group` make this call, and raise unless their `text` is the same.

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
    """Return, on every rank, the ranks with each `text` of the group, in order; empty if all have the same.

    Of long texts that part which differs: see `require_same_text`, whose communication it has; where they
    differ, also a broadcast of the first text and 264 bytes a rank. With `optional` a rank without a text
    is not counted. `about` names the call for errors of the exchange, in place of the text.
    """
    headers = _all_gather_headers(text, group, device, about)
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


def shown(versions: Mapping[str, list[int]]) -> str:
    """Return the result of `different_texts` as text: `rank 0: …; ranks 1, 2: …`."""
    ranks_of = (
        (part, f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}")
        for part, ranks in versions.items()
    )
    return "; ".join(f"{ranks}: {part}" for part, ranks in ranks_of)


def require_matching_sizes(sizes: PieceSizes, call: str, group: Group, device: torch.device) -> None:
    """Block until all ranks of `group` make this call, and raise unless each receives what the others send.

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
    """Return, on every rank, the `number` of each rank of `group`; `about` names the call, for errors.

    Communication: one all-gather of 8 bytes a rank, as that of `require_same_text`.
    """
    if group.transport is None:
        return [number]
    mine = torch.tensor([number], device=group.device_for_text(device))
    numbers: list[int] = _all_gather(mine, about, group, group.transport).flatten().tolist()
    return numbers


def _all_gather_headers(text: str, group: Group, device: torch.device, about: str) -> list[bytes]:
    transport = group.transport
    if transport is None:
        return [_encode(text)]
    mine = _as_tensor(_encode(text), group.device_for_text(device))
    rows = _all_gather(mine, about or text[:_FITS], group, transport)
    return [bytes(row.tolist()) for row in rows]


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
