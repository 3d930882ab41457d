"""Newton–Schulz iterations: torch's bits, the singular vectors of the matrix, each matrix by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import _muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from plait.errors import PlanError
from plait.optimizers.newton_schulz import (
    EPSILON,
    QUINTIC,
    coefficients_of_steps,
    iteration_cost,
    learning_rate_factor,
    orthogonalized,
)

SHAPES = [(7, 5), (5, 7), (64, 64), (33, 97), (97, 33), (1, 8)]


def test_the_defaults_are_those_of_torch() -> None:
    assert (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C) == QUINTIC
    assert (_muon.EPS, _muon.DEFAULT_NS_STEPS) == (EPSILON, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_bfloat16_each_matrix_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 3, *shape)
    expected = [_zeropower_via_newtonschulz(one, QUINTIC, 5, EPSILON) for one in matrices.flatten(0, 1)]
    assert torch.equal(orthogonalized(matrices).flatten(0, 1), torch.stack(expected))
    assert torch.equal(orthogonalized(matrices[0, 0]), expected[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_change_by_the_polynomial_of_each_step_and_singular_vectors_stay(
    shape: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    triples = (QUINTIC, (2.0, -1.5, 0.5), (15 / 8, -10 / 8, 3 / 8))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for a, b, c in triples:
        values = a * values + b * values**3 + c * values**5
    found = orthogonalized(matrix, triples, 3, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, left @ values.diag() @ right, rtol=0, atol=1e-13)


def test_a_matrix_of_zeros_stays_one_and_the_matrix_given_is_not_changed() -> None:
    assert orthogonalized(torch.zeros(3, 4)).eq(0).all()
    given = torch.ones(4, 3, dtype=torch.bfloat16)
    orthogonalized(given)
    assert given.eq(1).all()


@pytest.mark.parametrize("given", [(QUINTIC,) * 2, QUINTIC[:2], ((1.0, 2.0),) * 3], ids=str)
def test_another_number_of_coefficients_than_of_steps_is_refused(given: tuple[float, float, float]) -> None:
    with pytest.raises(PlanError, match="ns_steps 3: give one triple"):
        coefficients_of_steps(given, 3)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8)], ids=str)
def test_the_cost_of_an_iteration_is_half_of_its_counted_operations(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalized(torch.randn(shape), steps=3)
    assert counter.get_total_flops() == 2 * 3 * iteration_cost(*shape)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8)], ids=str)
def test_learning_rates_are_scaled_as_in_torch(shape: tuple[int, int]) -> None:
    for scaling in ("original", "match_rms_adamw"):
        assert math.isclose(
            learning_rate_factor(scaling, *shape), _adjust_lr(1.0, scaling, torch.Size(shape))
        )
    with pytest.raises(PlanError, match="choose 'original'"):
        learning_rate_factor("rms", *shape)  # type: ignore[arg-type]
