"""Which inputs of tensor-parallel regions nothing but linears in float8 reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.models.find_float8_only_inputs import read_by_float8_only
from plait.plan.rules import column, entrance, match, row
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.apply_rules import apply_rules
from plait.tensor.parallel.linear import RegionBoundary

HIDDEN, INNER, LENGTH = 16, 32, 6


class TwoRanks:
    """A group of two ranks, of which nothing is asked but its size: all is on the meta device."""

    name, size, index, ranks, guarded = "tp", 2, 0, (0, 1), False

    def skip(self, kind: str, tensor: Tensor) -> None:
        """Nothing is sent."""


class Layer(nn.Module):
    """A gated MLP, and what else reads the input of its region."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.norm, self.reads = nn.LayerNorm(HIDDEN), reads
        self.gate, self.up = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.other = nn.Linear(HIDDEN, INNER)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        entered = self.norm(x)
        up = self.up(entered) * self.gate(entered)
        if self.reads == "operation":
            up = up + entered.mean()
        elif self.reads == "other linear":
            up = up + self.other(entered)
        elif self.reads == "view":
            up = self.up(entered.flatten(0, 1)).view_as(up) * self.gate(entered)
        elif self.reads == "shape":
            up = up * entered.shape[0] * entered.dim()
        elif self.reads == "returned":
            return entered
        result: Tensor = self.down(up)
        return result


def found(reads: str, *linears: str) -> tuple[bool, ...]:
    """Of the one region of a `Layer`, of which each rank has half of the positions."""
    with torch.device("meta"):
        module: Any = Layer(reads)
        module.up, module.gate = nn.Linear(HIDDEN, INNER // 2), nn.Linear(HIDDEN, INNER // 2)
        module.down, module.other = nn.Linear(INNER // 2, HIDDEN), nn.Linear(HIDDEN, INNER // 2)
    module.up.out_features = module.gate.out_features = module.down.in_features = INNER
    rules = {"norm": entrance, "up": column, "gate": column, "down": row}
    group: Any = TwoRanks()
    boundary = RegionBoundary(group, dim=1, length=LENGTH)
    matched = match(rules, dict(module.named_modules()))
    (applied,) = apply_rules([("", module)], matched, group, [boundary])
    given = torch.empty(2, LENGTH // 2, HIDDEN, device="meta")
    return read_by_float8_only(NamedLayer("", applied), linears, given, LENGTH)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("nothing", True),
        ("shape", True),
        ("operation", False),
        ("other linear", False),
        ("view", False),
        ("returned", False),
    ],
)
def test_a_region_input_is_read_by_float8_linears_only_unless_another_operation_sees_it(
    reads: str, expected: bool
) -> None:
    assert found(reads, "up", "gate") == (expected,)


def test_a_linear_that_is_not_in_float8_is_another_reader() -> None:
    assert found("nothing", "up") == (False,)


def test_a_layer_without_regions_or_that_does_not_run_has_none() -> None:
    layer = NamedLayer("", nn.Linear(HIDDEN, HIDDEN, device="meta"))
    assert read_by_float8_only(layer, [""], torch.empty(2, HIDDEN, device="meta"), 0) == ()
    assert read_by_float8_only(layer, [""], torch.empty(2, HIDDEN + 1, device="meta"), 0) == ()
