"""The definition of linears in float8: as torchao computes them, and literals of its parts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from plait.verification.definitions.float8 import (
    E4M3,
    E5M2,
    LINES,
    RECIPES,
    Computation,
    Operands,
    cast_factor_for,
    float8_linear,
    product,
    quantised,
)

THEIRS = {"float8": "tensorwise", "float8-rowwise": "rowwise", "float8-rowwise-gw": "rowwise_with_gw_hp"}
"""The names of the recipes in torchao."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes, so that a scale of other elements gives other numbers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.exp2(torch.randint(-6, 7, (size,), generator=generator).double()) for size in shape]
    return torch.randn(shape, dtype=torch.float64, generator=generator) * sizes[0][:, None] * sizes[1]


def test_each_recipe_is_that_of_torchao() -> None:
    """In bf16 outputs and gradients differ by the rounding of fp32 sums at most: in the last bit, rarely."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert THEIRS.keys() == RECIPES.keys()
    for recipe, name in THEIRS.items():
        plain = nn.Sequential(nn.Linear(64, 96)).bfloat16()
        with torch.no_grad():
            plain[0].weight.copy_(drawn(96, 64, seed=1))
        config = Float8LinearConfig.from_recipe_name(name)
        theirs = convert_to_float8_training(copy.deepcopy(plain), config=config)
        inputs = [drawn(48, 64, seed=2).bfloat16().requires_grad_() for _ in range(2)]
        outputs = (
            theirs(inputs[0]),
            float8_linear(inputs[1], plain[0].weight, plain[0].bias, Computation(recipe)),
        )
        for output in outputs:
            output.backward(drawn(48, 96, seed=3).bfloat16())
        pairs = {
            "output": outputs,
            "input gradient": (inputs[0].grad, inputs[1].grad),
            "weight gradient": (theirs[0].weight.grad, plain[0].weight.grad),
            "bias gradient": (theirs[0].bias.grad, plain[0].bias.grad),
        }
        for what, (their, own) in pairs.items():
            assert their.dtype == own.dtype == torch.bfloat16, (recipe, what)
            steps = (their.view(torch.int16).int() - own.view(torch.int16).int()).abs()
            assert steps.max() <= 1, (recipe, what)
            assert (steps == 0).float().mean() > 0.99, (recipe, what)


def test_a_scale_is_the_largest_number_of_the_format_over_the_largest_element() -> None:
    matrix = torch.tensor([[1.0, -7.0], [0.25, 3.0]])
    assert cast_factor_for(torch.tensor(7.0), E4M3) == 64
    assert cast_factor_for(torch.tensor(7.0), E5M2) == 8192
    factors = cast_factor_for(torch.tensor([[7.0], [3.0], [0.0]]), LINES)
    assert factors.tolist() == [[64], [128], [1]]  # 149.3, down
    assert quantised(matrix, E4M3, 1).unit == 1 / 64
    assert quantised(matrix, LINES, 1).unit.tolist() == [[1 / 64], [1 / 128]]
    assert quantised(matrix, LINES, 0).unit.tolist() == [[1 / 256, 1 / 64]]  # 448, down


def test_numbers_are_the_nearest_of_the_format_and_none_is_beyond_its_end() -> None:
    row = torch.tensor([[448.0, 17.0, 19.0, 2.0**-10, 0.0]])
    assert quantised(row, E4M3, 1).numbers.tolist() == [[448, 16, 20, 0, 0]]
    # 57,344 / 448 is 128: of e5m2's numbers, three significant bits.
    assert quantised(row, E5M2, 1).numbers.tolist() == [[57344, 2048, 2560, 0.125, 0]]
    largest = 1 + torch.arange(100.0)[:, None] / 7  # of some the scale is rounded up
    lines = E4M3._replace(by_line=True)
    assert (largest * cast_factor_for(largest, lines)).max() > 448
    assert bool((quantised(largest, lines, 1).numbers == 448).all())


def test_operands_of_zeros_and_without_elements_give_zeros() -> None:
    for recipe in RECIPES:
        weight = torch.zeros(32, 16, requires_grad=True)
        for rows in (4, 0):
            inputs = torch.zeros(rows, 16, requires_grad=True)
            output = float8_linear(inputs, weight, None, Computation(recipe))
            given = (inputs, weight)
            found = (output, *torch.autograd.grad(output, given, torch.zeros_like(output)))
            assert [one.shape for one in found] == [(rows, 32), (rows, 16), (32, 16)]
            assert all(bool((one == 0).all()) for one in found)


def test_products_are_of_what_the_numbers_stand_for_also_in_float64() -> None:
    left, right = drawn(5, 16, seed=4), drawn(16, 7, seed=5)
    for how in (E4M3, LINES):
        a, b = quantised(left, how, 1), quantised(right, how, 0)
        found = product(left, right, Operands(how, how))
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, (a.numbers * a.unit) @ (b.numbers * b.unit), rtol=1e-13, atol=0)
        assert 0 < (found - left @ right).abs().max() < 0.1 * (left.abs() @ right.abs()).max()
    assert torch.equal(product(left, right, Operands(None, None)), left @ right)
