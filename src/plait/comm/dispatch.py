"""What every collective does first and last: refuse, agree, count; then start and hand out a handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plait.comm.buffers import describe
from plait.comm.consistency_check import HEADER_BYTES, require_same_text
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.transport.interface import Pending
from plait.errors import CommunicationError

T = TypeVar("T")


def begin(
    kind: str,
    tensor: Tensor | None,
    group: Group,
    *,
    detail: str = "",
    flaw: str | None,
    checked: bool,
    payload: int | None = None,
) -> None:
    """Refuse a call that has a `flaw`, on every rank if it is `checked`; count it otherwise.

    `payload` is in bytes, by default all of `tensor`. In a guarded group every call is checked, and the check
    counts as traffic.
    """
    alone = group.transport is None
    checked = checked or group.guarded
    if flaw or (checked and not alone):
        words = (kind, detail, tensor is not None and f"of {describe(tensor)}", flaw and f"but {flaw}")
        call = " ".join(word for word in words if word)
        if checked and not alone:
            require_same_text(call, group, torch.device("cuda") if tensor is None else tensor.device)
        if flaw:
            sentence = f"rank {group.rank} cannot call {call} over {group.name}: mend the arguments."
            raise CommunicationError(sentence)
    if not alone:
        if group.guarded:
            group.traffic.record(group.name, "guard", HEADER_BYTES)
        size = 0 if tensor is None else tensor.nbytes
        group.traffic.record(group.name, kind, size if payload is None else payload)


def start(kind: str, group: Group, launch: Callable[[], Pending], finish: Callable[[], T]) -> Handle[T]:
    """Launch the collective; `finish` gives the result of the handle's wait."""
    others = ", ".join(str(rank) for rank in group.ranks if rank != group.rank)
    return Handle(launch, finish, f"{kind} over {group.name} with {others}", group)


def alone(result: Tensor, out: Tensor | None) -> Tensor:
    """The result of a collective without others: `out` with a copy, or `result` itself."""
    return result if out is None else out.detach().copy_(result)


def whole_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """The shape of all ranks' tensors one after the other along dim 0."""
    first, *rest = tensor.shape or (1,)
    return (group.size * first, *rest)


def piece_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """The shape of one of `size` equal pieces of dim 0."""
    first, *rest = tensor.shape or (0,)
    return (first // group.size, *rest)


def undivided(tensor: Tensor, group: Group) -> str | None:
    """What is wrong with cutting `tensor` in `size` equal pieces, if anything."""
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        return f"dim 0 does not divide into {group.size} equal pieces"
    return None


def unfit(memory: Tensor | None, shape: Sequence[int], like: Tensor) -> str | None:
    """What is wrong with `memory` as the place of a result of `shape`, if anything."""
    if memory is None or (memory.shape == torch.Size(shape) and memory.dtype == like.dtype):
        return None
    dtype = str(like.dtype).removeprefix("torch.")
    return f"the place of the whole or the piece is {describe(memory)} and not {dtype}{list(shape)}"


def outside(index: int, group: Group) -> str | None:
    """What is wrong with `index` as a place in the group, if anything."""
    return None if 0 <= index < group.size else f"the group has indices 0 to {group.size - 1} only"
