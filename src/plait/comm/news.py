"""News of one rank: a text that all the others get."""

from __future__ import annotations

import torch

from plait.comm.collectives import broadcast
from plait.comm.group import Group


def tell(news: str, group: Group, device: torch.device) -> str:
    """What the first rank of `group` says; what the others hand in does not count.

    `device`: of this rank, where messages travel. Communication: two broadcasts, of 8 bytes and of the text.
    """
    text = torch.frombuffer(bytearray(news.encode() or b" "), dtype=torch.uint8).to(device)
    size = torch.tensor([len(text)], device=device)
    broadcast(size, group, checked=False).about("the length of news").wait()
    if group.index != 0:
        text = text.new_empty(int(size))
    return bytes(broadcast(text, group, checked=False).about("news").wait().tolist()).decode()
