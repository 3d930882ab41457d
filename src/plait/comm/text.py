"""News: a text of one rank, or of each, that all the others get."""

from __future__ import annotations

import torch

from plait.comm.collectives import all_gather, all_reduce, broadcast
from plait.comm.group import Group


def broadcast_text(news: str, group: Group, device: torch.device) -> str:
    """What the first rank of `group` says; what the others hand in does not count.

    `device`: of this rank, where messages travel. Communication: two broadcasts, of 8 bytes and of the text.
    """
    text = torch.frombuffer(bytearray(news.encode() or b" "), dtype=torch.uint8).to(device)
    size = torch.tensor([len(text)], device=device)
    broadcast(size, group, checked=False).about("the length of news").wait()
    if group.index != 0:
        text = text.new_empty(int(size))
    return bytes(broadcast(text, group, checked=False).about("news").wait().tolist()).decode()


def all_gather_text(news: str, group: Group, device: torch.device) -> list[str]:
    """What each rank of `group` says, in their order.

    Communication: an all-reduce of 8 bytes, and an all-gather of the longest text, for each rank.
    """
    text = news.encode()
    size = torch.tensor(len(text), device=device)
    longest = int(all_reduce(size, group, "max", checked=False).about("the length of news").wait())
    if longest == 0:
        return [""] * group.size
    padded = torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    texts = all_gather(padded, group, checked=False).about("news").wait().cpu().view(group.size, longest)
    return [bytes(line.tolist()).rstrip(b"\0").decode() for line in texts]
