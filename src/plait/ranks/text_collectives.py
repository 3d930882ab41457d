"""Text and errors over a group: broadcast from the first rank, or all-gathered."""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.errors import PlaitError
from plait.ranks.collectives import all_gather, all_reduce, broadcast
from plait.ranks.group import Group


def broadcast_text(text: str, group: Group, device: torch.device) -> str:
    """Return the first rank's `text` on every rank; the other ranks' is ignored.

    `device` is this rank's, for the tensors. Communication: two broadcasts, of 8 bytes and of the text.
    """
    return _broadcast(text, False, group, device)[0]


def broadcast_result(
    compute: Callable[[], str], error_type: type[PlaitError], group: Group, device: torch.device
) -> str:
    """Return on every rank the result of `compute()`, which is called on the first rank only.

    Where it raises a `PlaitError` or an `OSError`, every rank raises an `error_type` of the same text.
    Communication: as `broadcast_text`.
    """
    text, failed = "", False
    if group.index == 0:
        try:
            text = compute()
        except (PlaitError, OSError) as error:  # the other ranks wait
            text, failed = str(error), True
    text, failed = _broadcast(text, failed, group, device)
    if failed:
        raise error_type(text)
    return text


def all_gather_text(text: str, group: Group, device: torch.device) -> list[str]:
    """Return on every rank the list of all ranks' `text`, in order of rank index.

    Communication: an all-reduce of 8 bytes, then an all-gather of as many bytes a rank as the longest has.
    """
    data = text.encode()
    size = torch.tensor(len(data), device=device)
    longest = int(all_reduce(size, group, "max", checked=False).about("the length of a text").wait())
    if longest == 0:
        return [""] * group.size
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    rows = all_gather(padded, group, checked=False).about("a text").wait().cpu().view(group.size, longest)
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]


def first_nonempty_text(text: str, group: Group, device: torch.device) -> str:
    """Return on every rank the first rank's `text` that is not empty, such as an error; "" if all are empty.

    Communication: as `all_gather_text`.
    """
    return next(filter(None, all_gather_text(text, group, device)), "")


def _broadcast(text: str, failed: bool, group: Group, device: torch.device) -> tuple[str, bool]:
    encoded = text.encode()
    size = torch.tensor([~len(encoded) if failed else len(encoded)], device=device)  # below 0 for an error
    size = broadcast(size, group, checked=False).about("the length of a text").wait()
    failed, length = int(size) < 0, max(int(size), ~int(size))
    padded = encoded.ljust(1) if group.index == 0 else bytes(max(1, length))  # a tensor is never empty
    data = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    data = broadcast(data, group, checked=False).about("a text").wait()
    return bytes(data.tolist()[:length]).decode(), failed
