"""An all-to-all in ranges of different sizes on GPUs: ranks may send nothing, or receive nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from plait.ranks import Mesh, all_to_all_uneven

if TYPE_CHECKING:
    from gpu.ranks import GpuRanks

pytestmark = pytest.mark.gpu

ROUNDS = ([[2, 3], [4, 0]], [[0, 5], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [7, 1]], [[100_000, 1], [70_000, 3]])
"""`ROUNDS[n][i][j]` elements go from index i to index j."""


def exchanged(dtype: torch.dtype) -> list[Tensor]:
    """The results of all rounds, which are under way at once."""
    mesh = Mesh(dp=2)
    group = mesh.group("dp")
    handles = []
    for sizes in ROUNDS:
        sent, received = sizes[group.index], [row[group.index] for row in sizes]
        mine = (torch.arange(sum(sent), device=mesh.device) % 50 + 60 * group.index).to(dtype)
        handles.append(all_to_all_uneven(mine, group, sent, received, checked=len(handles) < 2))
    return [handle.wait().cpu() for handle in handles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_all_to_all_uneven_joins_received_ranges_in_order_of_sending_rank(
    gpu_ranks: GpuRanks, dtype: torch.dtype
) -> None:
    for index, results in enumerate(gpu_ranks.run(exchanged, dtype, ranks=2)):
        for sizes, result in zip(ROUNDS, results, strict=True):
            sent = [
                (torch.arange(sum(row)) % 50 + 60 * rank).to(dtype).split(row)
                for rank, row in enumerate(sizes)
            ]
            assert torch.equal(result, torch.cat([ranges[index] for ranges in sent]))
