"""Rounding errors of the verifier's own making: how large they are, and that they are the same each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.verification.reference.rounding_errors import Perturbation

WIDE = torch.linspace(-3, 5, 4096, dtype=torch.float64)


def test_perturbation_number_0_changes_nothing() -> None:
    assert Perturbation(0).perturb(WIDE) is WIDE


@pytest.mark.parametrize("tensor", [torch.arange(5), torch.ones(3, dtype=torch.bool), torch.empty(0, 4)])
def test_integer_boolean_and_empty_tensors_are_not_perturbed(tensor: torch.Tensor) -> None:
    assert torch.equal(Perturbation(1).perturb(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_error_is_at_most_a_rounding_of_the_element_and_of_the_usual_size(dtype: torch.dtype) -> None:
    tensor = WIDE.to(dtype)
    shaken = Perturbation(1).perturb(tensor)
    assert shaken.dtype == dtype
    epsilon = torch.finfo(dtype).eps
    largest = epsilon * (tensor.double().abs() + tensor.double().abs().median())
    error = (shaken.double() - tensor.double()).abs()
    assert (error <= largest + epsilon * tensor.double().abs()).all()  # the sum is rounded once more
    assert error.median() > largest.median() / 8


def test_an_elementwise_perturbation_is_at_most_a_rounding_of_the_element() -> None:
    tensor = torch.cat([WIDE, torch.zeros(4, dtype=torch.float64)])
    for epsilon, largest in ((None, 2.0**-52), (2.0**-10, 2.0**-10)):
        shaken = Perturbation(1).perturb_elementwise(tensor, epsilon)
        error = (shaken - tensor).abs()
        assert (error <= (largest + 2.0**-52) * tensor.abs()).all()
        assert error.median() > largest * tensor.abs().median() / 8
        assert not torch.equal(shaken, Perturbation(2).perturb_elementwise(tensor, epsilon))
    coarse = WIDE.bfloat16()
    assert 0 < (Perturbation(1).perturb_elementwise(coarse) - coarse).abs().max() <= 2 * 5 * 2.0**-7
    assert Perturbation(0).perturb_elementwise(WIDE) is WIDE
    for left in (torch.arange(5), torch.empty(0, 4)):
        assert Perturbation(1).perturb_elementwise(left) is left


def test_small_numbers_of_float16_are_off_by_their_last_digit() -> None:
    """Which is that of the smallest normal number; zeros alone stay."""
    digit = 2.0**-24
    small = torch.full((256,), 16 * digit, dtype=torch.float16)
    errors = (Perturbation(1).perturb(small) - small).double() / digit
    assert set(errors.tolist()) == {-1.0, 0.0, 1.0}
    assert not Perturbation(1).perturb(torch.zeros(256, dtype=torch.float16)).any()


def test_a_zero_among_nonzero_elements_is_perturbed() -> None:
    tensor = torch.zeros(64, dtype=torch.float64)
    assert torch.equal(Perturbation(1).perturb(tensor), tensor)
    tensor[24:] = 1.0
    errors = Perturbation(1).perturb(tensor)[:24].abs()
    assert (errors > 0).all()
    assert errors.max() <= 2.0**-52


def test_a_few_large_elements_do_not_enlarge_the_perturbation_of_others() -> None:
    """As the -1e9 of a mask."""
    tensor = torch.ones(9, dtype=torch.float64)
    tensor[3] = -1e9
    errors = (Perturbation(1).perturb(tensor) - tensor).abs()
    assert errors[[0, 1, 2, 4, 5]].max() <= 2 * 2.0**-52


@given(st.integers(1, 50))
def test_the_same_perturbation_number_makes_the_same_errors(number: int) -> None:
    one, two, other = Perturbation(number), Perturbation(number), Perturbation(number + 1)
    first = one.perturb(WIDE)
    assert torch.equal(first, two.perturb(WIDE))
    assert not torch.equal(first, one.perturb(WIDE))
    assert not torch.equal(first, other.perturb(WIDE))


def test_a_perturbation_does_not_advance_torchs_generator() -> None:
    before = torch.random.get_rng_state()
    Perturbation(3).perturb(WIDE)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_gradient_passes_through_a_perturbation_unchanged() -> None:
    tensor = WIDE.clone().requires_grad_()
    Perturbation(1).perturb(tensor).sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, torch.ones_like(tensor))


def test_an_infinity_stays_and_does_not_spread() -> None:
    """As in a mask that is added to scores: else the shaken run is all NaN, and then anything is allowed."""
    tensor = torch.tensor([1.0, -torch.inf, 0.5, 0.0], dtype=torch.float64)
    shaken = Perturbation(1).perturb(tensor)
    assert shaken[1] == -torch.inf
    assert (shaken[[0, 2, 3]] - tensor[[0, 2, 3]]).abs().max() < 1e-15
