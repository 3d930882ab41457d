import math

import pytest
import torch

from parity.norm import assert_close, assert_equal, ratios

EXPECTED = {"large": torch.tensor([2.0, -4.0]), "tiny": torch.tensor([1e-9])}


def off_by(**differences):
    return {name: tensor.double() + differences.get(name, 0.0) for name, tensor in EXPECTED.items()}


def test_the_parity_norm_measures_against_a_tensors_largest_element():
    assert ratios(off_by(large=2e-12), EXPECTED, 1e-12)["large"] == pytest.approx(0.5, rel=1e-3)


def test_the_parity_norm_measures_small_tensors_against_the_models_largest_gradient():
    assert ratios(off_by(tiny=4e-15), EXPECTED, 1e-12)["tiny"] == pytest.approx(1.0, rel=1e-3)


def test_a_failed_parity_check_names_the_worst_tensor():
    with pytest.raises(AssertionError, match=r"the gradient of tiny is 2\.5 times .* 2 of 2 are off"):
        assert_equal(off_by(large=8e-12, tiny=1e-14), EXPECTED, 1e-12, "the gradient")


def test_the_parity_norm_never_takes_nan_as_equal():
    assert ratios(off_by(tiny=math.nan), EXPECTED, 1e-12)["tiny"] == math.inf
    with pytest.raises(AssertionError, match="the loss is nan"):
        assert_close(math.nan, 1.0, 1e-12, "the loss")


def test_parity_fails_where_one_side_has_more_names():
    with pytest.raises(AssertionError, match="only on one side are tiny"):
        assert_equal({"large": EXPECTED["large"]}, EXPECTED, 1e-12, "the gradient")
