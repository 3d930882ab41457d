"""Sketches of what happens inside of a layer: what is noted, and which module is the first that differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from plait.verification.reference.differences_within_layers import (
    InnerDifference,
    ModuleSketches,
    first_inner_difference,
    sketch_of,
)
from plait.verification.reference.recording import Tolerance


class Layer(nn.Module):
    """Two linears, and what is done between them and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.between: Callable[[Tensor], Tensor] = torch.relu
        self.behind = 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.behind * self.down(self.between(self.up(self.norm(x))))
        return result


def layer() -> Layer:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return Layer().double()


X = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sketches_of(made: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    with closing(ModuleSketches(made)) as sketches:
        made(x)
    return sketches.found


def first(found: dict[str, Tensor], expected: dict[str, Tensor]) -> InnerDifference | None:
    return first_inner_difference(found, expected, {name: Tolerance(1.0, 1e-12) for name in expected})


def said(change: Callable[[Layer], object]) -> str:
    """Of a layer to which something was done."""
    changed = layer()
    change(changed)
    inside = first(sketches_of(changed), sketches_of(layer()))
    assert inside is not None
    return inside.sentence


def test_modules_stand_in_the_order_in_which_they_run() -> None:
    sides = [name.rsplit("|", 2)[0] for name in sketches_of(layer())]
    assert sides == [f"{path}|{side}" for path in ("norm", "up", "down") for side in ("given", "gives")]


def test_a_module_whose_output_differs_is_named() -> None:
    told = said(lambda made: setattr(made.norm, "eps", 1e-3))
    assert told == "inside, what norm gives is the first to differ, and what it is given is equal"


def test_a_difference_computed_between_modules_is_located() -> None:
    told = said(lambda made: setattr(made, "between", torch.tanh))
    assert told == (
        "inside, what down is given is the first to differ: what norm and up give is equal, so it is what is "
        "computed between"
    )


def test_a_difference_computed_after_the_last_module_is_located() -> None:
    told = said(lambda made: setattr(made, "behind", 2.0))
    assert told == "inside, what norm, up and down give is equal, so it is what the layer computes with that"


class Routed(nn.Module):
    """A module that gives several tensors, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.after = Route(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores, numbers = self.route(x)
        result: Tensor = self.after(x * scores) * numbers
        return result


class Route(nn.Module):
    """Scores, and whole numbers."""

    shift = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sigmoid(), (x > 0).long().cumsum(-1) + self.shift


def test_each_tensor_that_a_module_gives_is_compared_whole_numbers_too() -> None:
    torch.manual_seed(0)
    made = Routed().double()
    expected = sketches_of(made)
    assert [name for name in expected if name.startswith("route|gives")] == [
        "route|gives|0|15",
        "route|gives|0.1|15",
    ]
    made.route.shift = 1
    told = first(sketches_of(made), expected)
    assert told is not None
    assert told.sentence == "inside, what route gives is the first to differ, and what it is given is equal"


def test_rounding_is_no_difference_between_sketches() -> None:
    expected = sketches_of(layer())
    assert first({name: one * (1 + 1e-15) for name, one in expected.items()}, expected) == first(
        expected, expected
    )


@pytest.mark.parametrize("swap", [False, True])
def test_the_sketch_of_sharded_features_is_found_within_the_whole_one(swap: bool) -> None:
    expected = sketches_of(layer())
    found = dict(expected)
    part = expected["up|gives|0|15"][3:]
    found["up|gives|0|15"] = part + 0.1 if swap else part
    told = first(found, expected)
    assert told is not None
    assert told.sentence.startswith(
        "inside, what up gives is the first to differ"
        if swap
        else "inside, what norm, up and down give is equal"
    )


def test_more_features_than_all_are_another_tensor() -> None:
    expected = sketches_of(layer())
    found = {**expected, "up|gives|0|15": torch.cat([expected["up|gives|0|15"]] * 2)}
    told = first(found, expected)
    assert told is not None
    assert told.order == list(expected).index("up|gives|0|15")


def test_sketches_with_other_rows_are_not_compared_and_that_is_said() -> None:
    expected = sketches_of(layer())
    found = {name.replace("norm|gives|0|15", "norm|gives|0|8"): one for name, one in expected.items()}
    found["up|gives|0|15"] = expected["up|gives|0|15"] + 1
    told = first(found, expected)
    assert told is not None
    assert "is the first to differ of what could be compared" in told.sentence


def test_a_layer_without_modules_shows_nothing() -> None:
    assert first(sketches_of(nn.Linear(4, 2).double()), {}) is None


def test_sketches_are_ordered_by_their_place_in_the_forward() -> None:
    expected = sketches_of(layer())
    orders = []
    for name in expected:
        found = first({**expected, name: expected[name] + 1}, expected)
        assert found is not None
        orders.append(found.order)
    assert orders == sorted(orders) == list(range(len(expected)))


def test_a_sketch_sees_exchanged_rows_and_features() -> None:
    for changed in (X.flip(0), X.flip(1), X.flip(2)):
        assert not torch.allclose(sketch_of(changed), sketch_of(X))


def test_outputs_that_are_no_tensor_of_rows_have_no_sketch() -> None:
    made = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(0))
    assert list(sketches_of(made, torch.tensor([[0, 1]]))) == ["0|gives|0|2", "1|given|0|2"]


def test_only_the_latest_run_counts_and_hooks_are_removed() -> None:
    made = layer()
    sketches = ModuleSketches(made)
    made(X)
    assert sketches.found
    sketches.begin()
    assert not sketches.found
    sketches.close()
    made(X)
    assert not sketches.found
