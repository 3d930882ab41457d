"""The scales that a micro-batch has used: by linear and operand, none of those that nothing tells apart."""

from __future__ import annotations

import torch

from plait.verification.definitions.float8_scale_recorder import OperandScales, noted


def test_scales_of_zeros_and_of_noise_are_zero() -> None:
    units = torch.tensor([[1.0], [2.0**-48], [2.0**-40], [2.0]])
    assert noted(units).tolist() == [0, 0, 2.0**-40, 2]


def test_a_linear_that_runs_twice_has_no_scales() -> None:
    scales = OperandScales()
    for unit in (2.0, 3.0):
        scales.note("twice", "input", torch.full((1, 1), unit))
    scales.note("once", "input", torch.full((1, 1), 5.0))
    assert {name: one.tolist() for name, one in scales.found.items()} == {
        "twice|input": [],
        "once|input": [5],
    }
    scales.begin()
    assert scales.found == {}
