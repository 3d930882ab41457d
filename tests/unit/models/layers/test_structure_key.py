"""Layers have equal structures exactly where one run on the meta device speaks for both."""

import copy

import pytest
import torch
from torch import nn

from plait.engine.fingerprint import structure_of


class Scaled(nn.Module):
    def __init__(self, scale, table=None):
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.scale, self.table = scale, table


def frozen(module):
    return module.requires_grad_(False)


def shared(module):
    module.twice = module.inner
    return module


def marked(module, mark):
    module.weight.mark = mark
    return module


def hooked(module):
    module.register_forward_hook(print)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 3),
        lambda: nn.TransformerEncoderLayer(8, 2),
        lambda: Scaled(2.0, {"a": [1, (2, torch.float32)], "b": {3}}),
        lambda: Scaled(torch.relu),
        lambda: shared(Scaled(1)),
    ],
)
def test_structure_keys_of_equal_layers_and_copies_are_equal(make):
    one = make()
    assert structure_of(one) == structure_of(make()) == structure_of(copy.deepcopy(one))
    assert hash(structure_of(one)) == hash(structure_of(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False)),
        (nn.Linear(2, 3), nn.Linear(2, 3, dtype=torch.float64)),
        (nn.Linear(2, 3), frozen(nn.Linear(2, 3))),
        (nn.Linear(2, 3), nn.Linear(2, 3).eval()),
        (marked(nn.Linear(2, 3), 1), marked(nn.Linear(2, 3), 2)),
        (nn.ReLU(), nn.ReLU(inplace=True)),
        (nn.ReLU(), nn.GELU()),
        (Scaled(1), Scaled(1.0)),
        (Scaled(1), Scaled(True)),
        (Scaled(1, {"a": 1}), Scaled(1, {"a": 2})),
        (Scaled(object()), Scaled(object())),
        (Scaled(1), shared(Scaled(1))),
        (Scaled(1), hooked(Scaled(1))),
        (Scaled(lambda x: x), Scaled(lambda x: x)),
        (Scaled(1, torch.Generator()), Scaled(1, torch.Generator())),
    ],
)
def test_structure_keys_of_layers_that_may_compute_differently_differ(one, other):
    assert structure_of(one) != structure_of(other)


def test_nested_tuples_that_repeat_are_described_once_in_a_structure_key():
    """Else the time would double with each level."""
    held = ()
    for _ in range(200):
        held = (held, held)
    structure_of(Scaled(1, held))


def test_the_structure_key_of_a_module_that_contains_itself_terminates():
    module = Scaled(1)
    module.table = [module]
    structure_of(module)
