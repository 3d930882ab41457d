"""Column- and row-parallel linears, alone and as a block, against `nn.Linear`."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from layer_defects import (
    average_instead_of_sum,
    bias_added_by_every_rank,
    bias_without_gradient,
    gathered_along_the_first_dim,
    input_cut_along_the_first_dim,
    input_gradient_not_summed,
    reduction_scaled_backward,
    reduction_summed_again_backward,
    weight_without_gradient,
)
from parallel_cases import WIDTH, Trial, check, cut_block, draw, full_block, linear
from torch import Tensor, nn

from parity.pairs import in_quick
from plait.ranks import Mesh
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear

SHAPES = [(WIDTH,), (5, WIDTH), (2, 3, WIDTH), (2, 2, 3, WIDTH), (0, WIDTH), (WIDTH, WIDTH), (WIDTH,) * 3]
"""The last ones are square: a wrong dim would fit."""


def column_trial(full: nn.Linear, given: Tensor, *, gather: bool = False) -> Trial:
    gradient = draw(*given.shape[:-1], full.out_features, seed=9)
    cut = partial(ColumnParallelLinear.of, gather_output=gather)
    return Trial(full, cut, given, gradient, parts_out=not gather)


def row_trial(full: nn.Linear, given: Tensor, *, parallel: bool = True) -> Trial:
    gradient = draw(*given.shape[:-1], full.out_features, seed=9)
    cut = partial(RowParallelLinear.of, input_is_parallel=parallel)
    return Trial(full, cut, given, gradient, parts_in=parallel)


def block_trial(given: Tensor, *, outputs: int = 8, bias: bool = True) -> Trial:
    return Trial(full_block(outputs, bias=bias), cut_block, given, draw(*given.shape[:-1], outputs, seed=9))


def inputs() -> list[Tensor]:
    """All shapes, and two that are not contiguous."""
    strided = draw(WIDTH, 5, seed=2).t(), draw(3, 2 * WIDTH, 4, seed=3).movedim(1, -1)[..., ::2]
    return [*(draw(*shape) for shape in SHAPES if 0 not in shape), *strided]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_block_equals_the_full_linears(thread_ranks, ranks, deferred):
    trials = [block_trial(given, bias=bias) for bias in (True, False) for given in inputs()]
    check(thread_ranks, ranks, *trials, deferred=deferred)


@pytest.mark.parametrize(
    ("ranks", "deferred"),
    in_quick(product((1, 2, 3, 4), (True, False)), (2, True), (2, False), (3, False), (4, True)),
)
def test_each_layer_equals_the_full_linear(thread_ranks, ranks, deferred):
    trials = [
        trial
        for bias in (True, False)
        for given in inputs()
        for full in (linear(bias=bias), linear(WIDTH, 24, bias=bias))
        for trial in (
            column_trial(full, given),
            column_trial(full, given, gather=True),
            row_trial(full, given),
            row_trial(full, given, parallel=False),
        )
    ]
    check(thread_ranks, ranks, *trials, deferred=deferred)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_of_parallel_linears_get_no_gradient(thread_ranks, frozen, deferred):
    trials = [
        trial
        for full in (linear(frozen=frozen), linear(frozen=frozen, bias=False))
        if any(parameter.requires_grad for parameter in full.parameters())
        for trial in (column_trial(full, draw(3, WIDTH)), row_trial(full, draw(3, WIDTH)))
    ]
    check(thread_ranks, 2, *trials, deferred=deferred)


@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_of_two_backwards_of_parallel_linears_add_up(thread_ranks, deferred):
    check(thread_ranks, 2, block_trial(draw(3, WIDTH)), deferred=deferred, twice=True)


def test_parallel_linears_accept_an_input_of_no_rows(thread_ranks):
    def body():
        group = Mesh(tp=2).group("tp")
        given = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
        layer = cut_block(full_block(), group)
        output = layer(given)
        output.sum().backward()
        return output.shape, [parameter.grad.count_nonzero().item() for parameter in layer.parameters()]

    assert thread_ranks.run(body, ranks=2) == [((0, 8), [0, 0, 0, 0])] * 2


BROKEN = [
    (bias_added_by_every_rank, row_trial, {}, "output"),
    (average_instead_of_sum, row_trial, {}, "output"),
    (average_instead_of_sum, column_trial, {}, "gradient of the input"),
    (reduction_scaled_backward, row_trial, {}, "gradient of the input"),
    (reduction_summed_again_backward, row_trial, {}, "gradient of the input"),
    (input_gradient_not_summed, column_trial, {"gather": True}, "the ranks differ"),
    (weight_without_gradient, column_trial, {}, "weight"),
    (weight_without_gradient, row_trial, {}, "weight"),
    (bias_without_gradient, column_trial, {}, "bias"),
    (gathered_along_the_first_dim, column_trial, {"gather": True}, "output"),
    (input_cut_along_the_first_dim, row_trial, {"parallel": False}, "output"),
]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(("defect", "trial", "options", "finding"), BROKEN)
def test_the_check_of_parallel_linears_finds_each_defect(
    rank_pool, defect, trial, options, finding, deferred
):
    with pytest.raises(AssertionError, match=finding):
        check(rank_pool, 2, trial(linear(), draw(WIDTH, WIDTH), **options), deferred=deferred, defect=defect)
