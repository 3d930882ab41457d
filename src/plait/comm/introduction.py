"""When a mesh is made, its ranks tell each other where they are."""

from __future__ import annotations

import json

import torch

from plait.comm.backend import all_gather_single
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.host import door, host

_CARD_BYTES = 512


def introduce(world: Group) -> host.Host | None:
    """Who of `world` is on this host; None where tensors on the CPU do not travel. All its ranks call it.

    Communication: one all-gather of 512 bytes over the world, not counted as traffic.
    """
    if world.process_group is None or not world.uses_gloo:
        return None
    own = door.Door() if door.possible() else None
    card = host.home() if own is None else {**host.home(), "door": own.name}
    cards = _exchange(card, world)
    return None if own is None else host.Host(own, cards)


def _exchange(card: dict[str, str], group: Group) -> list[dict[str, str]]:
    """Everyone's card, in rank order."""
    text = json.dumps(card).encode()
    assert len(text) <= _CARD_BYTES, "a card holds a host name and a few numbers"
    mine = torch.frombuffer(bytearray(text.ljust(_CARD_BYTES)), dtype=torch.uint8)
    everyone = torch.empty(group.size * _CARD_BYTES, dtype=torch.uint8)
    awaited = f"introductions over {group.name} with ranks {', '.join(map(str, group.ranks))}"
    cards = Handle(lambda: all_gather_single(everyone, mine, group), lambda: everyone, awaited, group).wait()
    return [json.loads(bytes(card.tolist())) for card in cards.view(group.size, _CARD_BYTES)]
