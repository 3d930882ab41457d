"""Before a collective: do all ranks of the group mean the same call?

A backend does not ask. When sizes differ Gloo ends the process, without an exception that could be caught;
other differences give wrong numbers or a hang. So the ranks first exchange what they are about to do, as text
of a fixed size.
"""

from __future__ import annotations

import hashlib

import torch

from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.transport.interface import Pending
from plait.errors import CommunicationError

HEADER_BYTES = 256
_DIGEST_BYTES = 16


def require_same_text(call: str, group: Group, device: torch.device) -> None:
    """Return when every rank of `group` is about to make the same `call`; block until all have come.

    Communication: one all-gather of 256 bytes per rank over the group, not counted as traffic; on CUDA
    without Gloo it synchronises the host. Raises `CommunicationError` on every rank, with who calls what.
    """
    calls = _calls(call, group, device)
    if len(set(calls)) > 1:
        raise CommunicationError(_disagreement(calls, group))


def ranks_unlike_first(text: str, group: Group, device: torch.device) -> list[int]:
    """Return the ranks whose `text` is not that of the group's first, on every rank alike.

    Communication: as `agree`.
    """
    first, *others = _calls(text, group, device)
    return [rank for rank, other in zip(group.ranks[1:], others, strict=True) if other != first]


def _calls(call: str, group: Group, device: torch.device) -> list[bytes]:
    """Return the header of each rank's `call`, in the order of the group's ranks."""
    transport = group.transport
    if transport is None:
        return [_encode(call)]
    place = group.device_for_text(device)
    mine = torch.frombuffer(bytearray(_encode(call)), dtype=torch.uint8).to(place)
    everyone = torch.empty(group.size * HEADER_BYTES, dtype=torch.uint8, device=place)

    def start() -> Pending:
        return transport.all_gather(mine, everyone)

    awaited = f"agreement on {call} over {group.name} with ranks {_numbers(group.ranks)}"
    headers = Handle(start, lambda: everyone.cpu().view(group.size, HEADER_BYTES), awaited, group).wait()
    return [bytes(header.tolist()) for header in headers]


def _encode(call: str) -> bytes:
    """The digest of the whole text, then as much of the text as fits."""
    text = call.encode()
    header = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text
    return header[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")


def _disagreement(calls: list[bytes], group: Group) -> str:
    callers: dict[bytes, list[int]] = {}
    for rank, call in zip(group.ranks, calls, strict=True):
        callers.setdefault(call, []).append(rank)
    said = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {_numbers(ranks)}: {_decode(call)}"
        for call, ranks in callers.items()
    )
    return (
        f"the ranks of {group.name} do not agree ({said}): make the same call with the same shapes on each."
    )


def _decode(header: bytes) -> str:
    return header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")


def _numbers(ranks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
