"""Tensors that all ranks of a group on one host can reach: reduced where they lie, without messages.

Over Gloo the ranks of one host talk through the loopback interface, which copies each byte several times
and takes the processor's time from the step itself. A tensor made by `shared_zeros` lies in memory that every
rank of its group maps; `all_reduce` then has each rank sum its piece of everyone's tensor, in rank order,
and write it back to everyone's. Only two small exchanges say when to begin and when all are done.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm import arithmetic
from plait.comm.arithmetic import Op
from plait.comm.backend import all_gather_single
from plait.comm.call import swap
from plait.comm.group import Group
from plait.comm.handle import Handle

SMALLEST = 2**18
"""Bytes. Below, the exchanges cost as much as sending the tensor itself."""
BLOCK = 2**16
"""Elements that are summed at once, so that the sum stays in the cache."""
_CARD_BYTES = 512
_TOKEN_BYTES = 16


def shared_zeros(size: int, dtype: torch.dtype, device: torch.device, group: Group | None) -> Tensor:
    """Zeros, flat `[size]`; in memory that every rank of `group` maps where that is possible and pays.

    All ranks of the group call it alike and in the same order. It is possible on the CPU under Linux, for
    ranks on one host. Communication: two all-gathers of 512 bytes, not counted as traffic. The tensor's
    storage cannot be resized. Resident memory counts what a rank touches of its peers' tensors as well.
    """
    plain = torch.zeros(size, dtype=dtype, device=device)
    if group is None or group.process_group is None or not _pays(plain, group):
        return plain
    nbytes = plain.nbytes
    descriptor = os.memfd_create("plait")
    try:
        os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
        own = mmap.mmap(descriptor, nbytes + _TOKEN_BYTES)
        own[nbytes:] = secrets.token_bytes(_TOKEN_BYTES)
        card = {**_home(), "pid": os.getpid(), "fd": descriptor, "token": own[nbytes:].hex()}
        cards = _exchange(card, group)
        maps = [own if card == other else _open(other, card, nbytes) for other in cards]
        # Nobody closes its descriptor before everyone has opened it, and all of them or none share.
        everywhere = all(answer["opened"] for answer in _exchange({"opened": None not in maps}, group))
    finally:
        os.close(descriptor)
    if not everywhere:
        return plain
    everyone = tuple(torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype) for memory in maps)
    mine = everyone[group.index]
    group.shared[mine] = everyone[: group.index], everyone[group.index + 1 :]
    return mine


def sharers(tensor: Tensor, group: Group) -> tuple[Tensor, ...] | None:
    """Everyone's tensor in rank order, if `tensor` was made by `shared_zeros` for this group."""
    if tensor not in group.shared:
        return None
    before, after = group.shared[tensor]
    return (*before, tensor, *after)


def all_reduce_shared(everyone: Sequence[Tensor], op: Op, group: Group) -> Handle[Tensor]:
    """Start to reduce shared tensors in place; the work is done by whoever waits, on every rank."""
    others = ", ".join(str(rank) for rank in group.ranks if rank != group.rank)
    awaited = f"all_reduce over {group.name} with {others}"

    def finish() -> Tensor:
        _reduce_piece(everyone, op, group)
        _meet(group, awaited).wait()
        return everyone[group.index]

    begun = _meet(group, awaited)
    return begun.then(finish)


def _reduce_piece(everyone: Sequence[Tensor], op: Op, group: Group) -> None:
    size = everyone[0].numel()
    share = -(-size // group.size)
    total = torch.empty(BLOCK, dtype=everyone[0].dtype)
    stop = min(size, (group.index + 1) * share)
    for first in range(group.index * share, stop, BLOCK):
        pieces = [tensor[first : min(first + BLOCK, stop)] for tensor in everyone]
        result = total[: len(pieces[0])]
        arithmetic.fold(pieces, op, result)
        for piece in pieces:
            piece.copy_(result)


def _meet(group: Group, awaited: str) -> Handle[None]:
    """Start to wait until all ranks of the group are here."""
    here, there = torch.zeros(group.size, dtype=torch.uint8), torch.zeros(group.size, dtype=torch.uint8)

    def let_go(_keep: tuple[Tensor, Tensor] = (here, there)) -> None:
        return None

    return Handle(lambda: swap(there, here, group), let_go, awaited, group)


def _pays(tensor: Tensor, group: Group) -> bool:
    possible = hasattr(os, "memfd_create") and tensor.device.type == "cpu" and group.uses_gloo
    return possible and tensor.nbytes >= SMALLEST


def _home() -> dict[str, Any]:
    """Where process numbers mean the same: one boot of one host, one namespace of processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return {"host": socket.gethostname(), "boot": boot, "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": secrets.token_hex(8)}  # unlike any other


def _open(other: dict[str, Any], mine: dict[str, Any], nbytes: int) -> mmap.mmap | None:
    """Another rank's memory, or None where it is out of reach."""
    if any(other.get(key) != mine.get(key) for key in ("host", "boot", "space")):
        return None
    try:
        descriptor = os.open(f"/proc/{other['pid']}/fd/{other['fd']}", os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, nbytes + _TOKEN_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if memory[nbytes:].hex() == other["token"] else None


def _exchange(card: dict[str, Any], group: Group) -> list[dict[str, Any]]:
    """Everyone's card, in rank order."""
    text = json.dumps(card).encode()
    assert len(text) <= _CARD_BYTES, "a card holds a host name and a few numbers"
    mine = torch.frombuffer(bytearray(text.ljust(_CARD_BYTES)), dtype=torch.uint8)
    everyone = torch.empty(group.size * _CARD_BYTES, dtype=torch.uint8)
    awaited = f"shared memory over {group.name} with ranks {', '.join(map(str, group.ranks))}"
    cards = Handle(lambda: all_gather_single(everyone, mine, group), lambda: everyone, awaited, group).wait()
    return [json.loads(bytes(card.tolist())) for card in cards.view(group.size, _CARD_BYTES)]
