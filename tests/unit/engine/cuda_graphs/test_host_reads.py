from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.engine.cuda_graphs.host_reads import HostReads
from plait.tensor.autograd.private_torch_functions import run_backward

X = torch.arange(12, dtype=torch.float64).view(3, 4)


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense"),
        (lambda x: bool((x > 1).any()), "aten._local_scalar_dense"),
        (lambda x: torch.nonzero(x), "aten.nonzero"),
        (lambda x: x[x > 1], "aten.index"),
        (lambda x: torch.masked_select(x, x > 1), "aten.masked_select"),
        (lambda x: torch.equal(x, x + 1), "aten.equal"),
        (lambda x: x.sum(0).tolist(), "Tensor.tolist"),
        (lambda x: x.numpy(), "Tensor.numpy"),
        (lambda x: np.asarray(x), "Tensor.__array__"),
    ],
)
def test_operations_whose_result_the_host_reads_are_noted(
    compute: Callable[[Tensor], object], operation: str
) -> None:
    with HostReads() as reads:
        compute(X)
    assert reads.reads[:1] == [operation]


def test_other_operations_are_not() -> None:
    leaf = X.clone().requires_grad_()
    with HostReads() as reads:
        rows = leaf[torch.tensor([0, 2])]
        attended = functional.scaled_dot_product_attention(*(rows[None, None],) * 3)
        attended.sum().backward()  # type: ignore[no-untyped-call]
    assert (reads.reads, reads.draws) == ([], [])


def test_a_read_within_a_backward_is_noted() -> None:
    leaf = X.clone().requires_grad_()
    product = leaf * 2
    product.register_hook(lambda gradient: gradient * len(gradient.tolist()))
    with HostReads() as reads:
        run_backward([product], [torch.ones_like(X)])
    assert reads.reads == ["Tensor.tolist"]


@pytest.mark.parametrize("compute", [torch.rand_like, lambda x: functional.dropout(x, 0.5), torch.bernoulli])
def test_operations_that_draw_at_random_are_noted(compute: Callable[[Tensor], object]) -> None:
    with HostReads() as reads:
        compute(X.clamp(0, 1))
    assert len(reads.draws) == 1
