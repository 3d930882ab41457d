"""Dispatch of collectives: validate arguments, check consistency, count traffic, call the transport."""

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


def check_and_count(
    kind: str,
    tensor: Tensor | None,
    group: Group,
    *,
    detail: str = "",
    error: str | None,
    checked: bool,
    payload: int | None = None,
) -> None:
    """Raise for an `error` in the arguments, on every rank if `checked`; else count traffic.

    `payload` is in bytes, by default those of `tensor`. In a guarded group every call is checked, and the
    check counts as traffic. Raises `CommunicationError`.
    """
    alone = group.transport is None
    checked = checked or group.guarded
    if error or (checked and not alone):
        parts = (kind, detail, tensor is not None and f"of {describe(tensor)}", error and f"but {error}")
        call = " ".join(part for part in parts if part)
        if checked and not alone:
            require_same_text(call, group, torch.device("cuda") if tensor is None else tensor.device)
        if error:
            sentence = f"rank {group.rank} cannot call {call} over {group.name}: mend the arguments."
            raise CommunicationError(sentence)
    if not alone:
        if group.guarded:
            group.traffic.record(group.name, "guard", HEADER_BYTES)
        size = 0 if tensor is None else tensor.nbytes
        group.traffic.record(group.name, kind, size if payload is None else payload)


def start(kind: str, group: Group, launch: Callable[[], Pending], finish: Callable[[], T]) -> Handle[T]:
    """Start a collective by `launch()`; return its handle, whose result `finish()` makes."""
    others = ", ".join(str(rank) for rank in group.ranks if rank != group.rank)
    return Handle(launch, finish, f"{kind} over {group.name} with {others}", group)


def copy_to(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `result`, or `out` with a copy of it: the result of a collective of one rank."""
    return result if out is None else out.detach().copy_(result)


def whole_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """Return the shape of all ranks' tensors concatenated along dim 0."""
    first, *rest = tensor.shape or (1,)
    return (group.size * first, *rest)


def piece_shape(tensor: Tensor, group: Group) -> tuple[int, ...]:
    """Return the shape of one of `size` equal pieces of dim 0."""
    first, *rest = tensor.shape or (0,)
    return (first // group.size, *rest)


def division_error(tensor: Tensor, group: Group) -> str | None:
    """Return why dim 0 of `tensor` has no `size` equal pieces, or None."""
    if tensor.dim() == 0 or tensor.shape[0] % group.size:
        return f"dim 0 does not divide into {group.size} equal pieces"
    return None


def buffer_error(buffer: Tensor | None, shape: Sequence[int], like: Tensor) -> str | None:
    """Return why `buffer` is not of `shape` and the dtype of `like`, or None."""
    if buffer is None or (buffer.shape == torch.Size(shape) and buffer.dtype == like.dtype):
        return None
    dtype = str(like.dtype).removeprefix("torch.")
    return f"the buffer of the whole or the piece is {describe(buffer)} and not {dtype}{list(shape)}"


def index_error(index: int, group: Group) -> str | None:
    """Return why `index` is no rank of the group, or None."""
    return None if 0 <= index < group.size else f"the group has indices 0 to {group.size - 1} only"
