"""Consistency check before a collective: all ranks of the group must make the same call.

A backend does not check. When sizes differ Gloo ends the process, without an exception that could be caught;
other differences give wrong numbers or a hang. So the ranks first exchange a description of the call, as text
of a fixed size.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.transport.interface import PieceSizes, Transport
from plait.errors import CommunicationError

HEADER_BYTES = 256
_DIGEST_BYTES = 16
SIZE_BYTES = 16
"""Bytes that each rank passes to the check of piece sizes, for each rank of the group."""


def require_same_text(text: str, group: Group, device: torch.device) -> None:
    """Block until all ranks of `group` make this call, and raise unless their `text` is the same.

    Communication: one all-gather of 256 bytes per rank over the group, not counted as traffic; on CUDA
    without Gloo it synchronises the host. Raises `CommunicationError` on every rank, with each rank's text.
    """
    headers = _all_gather_headers(text, group, device)
    if len(set(headers)) > 1:
        raise CommunicationError(_difference(headers, group))


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


def ranks_unlike_first(text: str, group: Group, device: torch.device) -> list[int]:
    """Return, on every rank, the ranks whose `text` differs from the first rank's.

    Communication: as `require_same_text`.
    """
    first, *others = _all_gather_headers(text, group, device)
    return [rank for rank, other in zip(group.ranks[1:], others, strict=True) if other != first]


def _all_gather_headers(text: str, group: Group, device: torch.device) -> list[bytes]:
    transport = group.transport
    if transport is None:
        return [_encode(text)]
    mine = torch.frombuffer(bytearray(_encode(text)), dtype=torch.uint8).to(group.device_for_text(device))
    return [bytes(header.tolist()) for header in _all_gather(mine, text, group, transport)]


def _all_gather(mine: Tensor, call: str, group: Group, transport: Transport) -> Tensor:
    """Return the tensors that all ranks compare for `call`, stacked by index, on the CPU."""
    everyone = mine.new_empty(group.size, *mine.shape)
    ranks = ", ".join(map(str, group.ranks))
    awaited = f"the consistency check of {call} over {group.name} with ranks {ranks}"
    return Handle(partial(transport.all_gather, mine, everyone), everyone.cpu, awaited, group).wait()


def _encode(text: str) -> bytes:
    """Return the digest of the whole text, then as much of the text as fits into `HEADER_BYTES`."""
    data = text.encode()
    header = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() + data
    return header[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")


def _difference(headers: list[bytes], group: Group) -> str:
    ranks_of: dict[bytes, list[int]] = {}
    for rank, header in zip(group.ranks, headers, strict=True):
        ranks_of.setdefault(header, []).append(rank)
    calls = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
        + header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
        for header, ranks in ranks_of.items()
    )
    return (
        f"the ranks of {group.name} do not agree ({calls}): make the same call with the same shapes on each."
    )
