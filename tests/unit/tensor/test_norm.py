"""An RMS norm over features of which each rank has some, beside torch's on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.ranks import Mesh
from plait.tensor.parallel.embedding_and_norm import partitioned_rms_norm


def test_a_sharded_rms_norm_equals_the_norm_over_all_features(thread_ranks: Any) -> None:
    """In float32 at least; without an epsilon it is that of the dtype in which the norm computes."""
    draw = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 8, dtype=torch.float64, generator=draw), torch.rand(8, generator=draw)
    x[0] *= 1e-4  # where an epsilon counts

    def body(dtype: torch.dtype, epsilon: float | None) -> Tensor:
        group = Mesh(tp=2).group("tp")
        own = [one.to(dtype).chunk(2, -1)[group.index] for one in (x, weight)]
        part = partitioned_rms_norm(*own, epsilon, group)
        assert part.dtype == dtype
        return part

    for dtype in (torch.float64, torch.bfloat16):
        wide = torch.promote_types(dtype, torch.float32)
        for epsilon in (None, 1e-3):
            expected = functional.rms_norm(x.to(dtype).to(wide), (8,), weight.to(dtype).to(wide), epsilon)
            found = torch.cat(thread_ranks.run(body, dtype, epsilon, ranks=2), -1)
            torch.testing.assert_close(found, expected.to(dtype))
