import math

import pytest
import torch

from parity.norm import assert_close, assert_equal, ratios

EXPECTED = {"large": torch.tensor([2.0, -4.0]), "tiny": torch.tensor([1e-9])}


def off_by(**differences):
    return {name: tensor.double() + differences.get(name, 0.0) for name, tensor in EXPECTED.items()}


def test_the_largest_element_is_the_measure():
    assert ratios(off_by(large=2e-12), EXPECTED, 1e-12)["large"] == pytest.approx(0.5, rel=1e-3)


def test_small_tensors_are_measured_against_the_floor():
    assert ratios(off_by(tiny=4e-15), EXPECTED, 1e-12)["tiny"] == pytest.approx(1.0, rel=1e-3)


def test_failures_name_the_worst():
    with pytest.raises(AssertionError, match=r"the gradient of tiny is 2\.5 times .* 2 of 2 are off"):
        assert_equal(off_by(large=8e-12, tiny=1e-14), EXPECTED, 1e-12, "the gradient")


def test_nan_is_never_equal():
    assert ratios(off_by(tiny=math.nan), EXPECTED, 1e-12)["tiny"] == math.inf
    with pytest.raises(AssertionError, match="the loss is nan"):
        assert_close(math.nan, 1.0, 1e-12, "the loss")


def test_names_have_to_agree():
    with pytest.raises(AssertionError, match="only on one side are tiny"):
        assert_equal({"large": EXPECTED["large"]}, EXPECTED, 1e-12, "the gradient")
