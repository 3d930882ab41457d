"""Sums and other reductions of the ranks' tensors, in rank order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from plait.ranks.transport import rank_order_reduction as reduction
from plait.ranks.transport.rank_order_reduction import Op, blocks, fold, reduction_error

ONE_BY_ONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def in_rank_order(ranges: list[Tensor], op: str) -> Tensor:
    """The same by plain operations; of 16-bit floats in float32, rounded once."""
    wide = [one.float() if one.dtype in (torch.bfloat16, torch.float16) else one for one in ranges]
    total = wide[0]
    for one in wide[1:]:
        total = ONE_BY_ONE[op](total, one)
    return (total / len(ranges) if op == "mean" else total).to(ranges[0].dtype)


def test_tensors_of_ranks_are_reduced_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "BLOCK", 4)  # elements: ranges of 10 are cut in three
    floats: Any = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, op, ranks, length in product((*floats, torch.int64), get_args(Op), (2, 3, 4), (3, 4, 10)):
        if reduction_error(op, dtype):
            continue
        torch.manual_seed(ranks)
        ranges = [(3 * torch.randn(length)).to(dtype) for _ in range(ranks)]
        expected = in_rank_order(ranges, op)
        for out in (torch.empty(length, dtype=dtype), ranges[1], ranges[0]):
            given = [one.clone() if one is not out else one for one in ranges]
            kept = out.clone()
            fold(given, op, out)
            assert torch.equal(out, expected), (dtype, op, ranks, length)
            out.copy_(kept)
    assert [len(one) for one, _ in blocks((torch.ones(10), torch.ones(10)))] == [4, 4, 2]
    assert [len(one) for (one,) in blocks((torch.ones(4),))] == [4]


def test_a_reduction_that_a_dtype_does_not_allow_is_named() -> None:
    assert reduction_error("sum", torch.int64) is None
    assert reduction_error("mean", torch.bfloat16) is None
    assert reduction_error("median", torch.int64) == (
        "the reduction 'median' is none of sum, mean, product, min, max"
    )
    assert reduction_error("mean", torch.int64) == "torch.int64 has no mean (use sum)"
    assert "torch.complex64 cannot be reduced (use view_as_real" in str(
        reduction_error("sum", torch.complex64)
    )
