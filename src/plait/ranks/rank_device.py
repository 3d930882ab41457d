"""Chooses the device of a rank: the one that is given, else its GPU where NCCL is used, else the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from plait.errors import MeshError, listed
from plait.ranks.accelerator import (
    CPU,
    accelerator_of_rank,
    current_accelerator,
    default_device,
    is_accelerator,
)
from plait.ranks.gpu_sharing import ranks_per_gpu
from plait.ranks.transport.interface import RankTransports


def device_of_rank(device: str | torch.device | None, ranks: RankTransports | None) -> torch.device:
    """Return this rank's device: `device`, or by default its GPU if there is NCCL for it, else the CPU.

    `cuda` without an index is this rank's GPU.
    """
    if device is None:
        device = default_device() if ranks is None or ranks.uses_nccl else CPU
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise MeshError(f"the mesh's device is {device!r} ({reason}): give cpu, cuda or cuda:0.") from None
    if is_accelerator(chosen) and chosen.index is None:
        own = os.environ.get("LOCAL_RANK")  # set by torchrun; else `join_world` has set the current device
        return current_accelerator() if own is None else accelerator_of_rank(int(own), ranks_per_gpu())
    return chosen


def device_change(tensors: Iterable[torch.device], chosen: torch.device, *, by_default: bool) -> str:
    """Return a warning that a model's `tensors` will be copied to the `chosen` device; "" if none is due.

    "" also where it was built on the CPU and somebody chose a GPU. `by_default`: nobody chose.
    """
    elsewhere = sorted({one.type for one in tensors} - {"meta", chosen.type})
    if not elsewhere or (is_accelerator(chosen) and not by_default):
        return ""
    return (
        f"the model's tensors are on {listed(elsewhere)}, and the mesh's device is {chosen}, to which they "
        f"are copied: give the mesh device={elsewhere[0]!r} to train there."
    )
