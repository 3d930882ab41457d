from __future__ import annotations

import pytest
from torch import nn

from plait.models.layers.layer_sequence import evaluating


def test_after_evaluation_every_module_has_its_own_mode_again() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    with evaluating([layers]):
        assert not any(module.training for module in layers.modules())
    assert [module.training for module in layers.modules()] == [True, True, False]


def test_after_an_exception_in_evaluation_every_module_has_its_own_mode_again() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), evaluating([layer]):
        _ = 1 // 0
    assert layer.training
