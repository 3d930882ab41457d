"""An RMS norm keeps on the device what `plait.memory` counts for it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plait.estimate.memory.storage_tracker import StorageTracker
from plait.ranks.accelerator import default_device

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

SHAPE = 3, 5, 64


def kept_bytes(dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Of each storage that is alive after a norm's forward: on the rank's device, and as the tracker says."""
    device, kept = default_device(), list[Tensor]()
    norm = nn.RMSNorm(SHAPE[-1], device=device, dtype=dtype)
    given = torch.empty(SHAPE, device=device, dtype=dtype, requires_grad=True)
    with saved_tensors_hooks(lambda saved: kept.append(saved.detach()), lambda saved: saved):
        output = norm(given)
    storages = {one.data_ptr(): one.untyped_storage().nbytes() for one in (given, norm.weight, output, *kept)}
    norm, tracker = norm.to("meta"), StorageTracker(on_cpu=device.type == "cpu")
    with tracker.tracking():
        given = torch.empty(SHAPE, dtype=dtype, requires_grad=True)
        tracker.number(norm.weight)
        output = norm(given)
        alive = tracker.live()
    return sorted(storages.values()), sorted(tracker.sizes[number] for number in alive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_norm_keeps_is_counted(gpu_ranks: GpuRanks, dtype: torch.dtype) -> None:
    ((found, counted),) = gpu_ranks.run(kept_bytes, dtype, ranks=1)
    assert counted == found
