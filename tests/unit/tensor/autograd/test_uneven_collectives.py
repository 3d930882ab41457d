"""The collectives that sequence parallelism is made of, against the whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ModelError
from plait.ranks import Group, Mesh, Traffic
from plait.tensor.autograd.regathered_activations import Gather, own_range, start_reduce_scatter

SHAPES = [
    (1, 8, 3),
    (2, 8, 3),
    (2, 7, 3),
    (1, 7, 3),
    (8, 2),
    (7, 2),
    (2, 3, 8),
    (2, 3, 7),
    (1, 2, 3),
    (0, 8, 3),
]
CASES = [
    (shape, dim) for shape in SHAPES for dim in range(-len(shape), len(shape)) if shape[dim] in (2, 7, 8)
]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_all_gather_and_reduce_scatter_give_the_whole_and_the_part_of_the_sum(
    thread_ranks: Any, ranks: int
) -> None:
    def body() -> list[tuple[Tensor, Tensor, Tensor]]:
        group, results = Mesh(tp=ranks).group("tp"), []
        for shape, dim in CASES:
            whole = Gather(group, dim, shape[dim]).whole(own_range(draw(shape, 0), group, dim))
            part = start_reduce_scatter(draw(shape, group.index), group, dim)()
            summed = own_range(sum(draw(shape, rank) for rank in range(ranks)), group, dim)
            for made in (whole, part):
                assert made.is_contiguous()
                assert made._base is None, "a layer may write to it"
            results.append((whole, part, summed.contiguous()))
        return results

    for results in thread_ranks.run(body, ranks=ranks):
        for (shape, _), (whole, part, wanted) in zip(CASES, results, strict=True):
            assert torch.equal(whole, draw(shape, 0))
            torch.testing.assert_close(part, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("length", [2, 3, 5])
def test_an_uneven_all_gather_refuses_a_part_of_the_wrong_length(length: int) -> None:
    """Filled up with zeros it would pass for one."""
    group = Group("tp", (0, 1), 0, None, Traffic(), 1.0)
    with pytest.raises(ModelError, match=r"whose ranks cut 8 along dim 1, so that this one has 4"):
        Gather(group, 1, 8).start(draw((2, length, 3), 0))
