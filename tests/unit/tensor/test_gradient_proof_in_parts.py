"""Layers on parts of a sequence, made by hand on the meta device: right ones pass, each mistake is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.proof.gradient_proof import Claims, prove_layer
from plait.ranks.group import Group, Traffic
from plait.tensor.autograd.paired_collectives import (
    copy,
    gather_in,
    reduce,
    scatter_out,
    split,
    to_parts,
    to_whole,
)

TP = Group("tp", (0, 1), 0, None, Traffic(), 1.0)
HIDDEN, LENGTH = 8, 6
CUT = frozenset({"up.weight", "up.bias", "down.weight"})
SUMMED = frozenset({"norm.weight", "norm.bias", "down.bias"})


@pytest.fixture(autouse=True)
def _on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


class Layer(nn.Module):
    """A norm and the linears of a region, with the sizes of one rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def product(self, entered: Tensor) -> Tensor:
        """What the ranks have to sum."""
        return functional.linear(functional.gelu(self.up(entered)), self.down.weight)


Run = Callable[..., Tensor]


def enter(tensor: Tensor) -> Tensor:
    return gather_in(tensor, TP, 1, LENGTH)


def leave(tensor: Tensor) -> Tensor:
    return scatter_out(tensor, TP, 1)


def own() -> Tensor:
    return torch.empty(2, LENGTH // 2, HIDDEN, requires_grad=True)


def whole() -> Tensor:
    return torch.empty(2, LENGTH, HIDDEN, requires_grad=True)


def prove(run: Run, *inputs: Tensor, begins: bool = True, ends: bool = True, summed: bool = True) -> None:
    layer = Layer()
    output = run(layer, *inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    claims = Claims(sharded=CUT, summed=SUMMED if summed else (), input_in_parts=begins, output_in_parts=ends)
    prove_layer("a", inputs, outputs, dict(layer.named_parameters()), claims)


def block(layer: Layer, x: Tensor) -> Tensor:
    return x + (leave(layer.product(enter(layer.norm(x)))) + layer.down.bias)


def test_a_sequence_parallel_block_is_accepted() -> None:
    prove(block, own())


def test_a_sequence_parallel_norm_is_accepted() -> None:
    prove(lambda layer, x: layer.norm(x), own())


def test_splitting_and_joining_the_sequence_around_a_layer_is_accepted() -> None:
    prove(lambda layer, x: block(layer, to_parts(x, TP, 1)), whole(), begins=False)
    prove(lambda layer, x: to_whole(block(layer, x), TP, 1, LENGTH), own(), ends=False)


def test_a_whole_layer_between_sequence_parallel_ones_is_accepted() -> None:
    def run(layer: Layer, x: Tensor) -> Tensor:
        return to_parts(layer.norm(to_whole(x, TP, 1, LENGTH)).cumsum(1), TP, 1)

    prove(run, own(), summed=False)


def test_a_whole_tensor_beside_a_sequence_parallel_block_is_accepted() -> None:
    """The first tensor is a part; another one is whole, and stays so."""

    def run(layer: Layer, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return block(layer, x), other * 2

    prove(run, own(), whole())


def test_a_parameter_whose_gradient_is_summed_may_be_inside_a_region() -> None:
    """Its gradient there is one rank's part, which is what is summed."""
    prove(lambda layer, x: block(layer, x) + leave(layer.product(enter(x) * layer.norm.weight)), own())


MIXED = "a: a value that is whole on every rank and a part of the sequence meet at "
MEND = "let the layer work on each position by itself outside of its regions, or remove its rule sequence."
REFUSED: dict[str, tuple[Run, tuple[Callable[[], Tensor], ...], dict[str, bool], str]] = {
    "a part and a whole value": (
        lambda layer, x, other: block(layer, x) + other[:, :3],
        (own, whole),
        {},
        f"{MIXED}Add (computed from down.bias): {MEND}",
    ),
    "a summed parameter and a whole value": (
        lambda layer, x: layer.norm(x),
        (whole,),
        {"begins": False, "ends": False},
        f"{MIXED}NativeLayerNorm (computed from norm.weight): {MEND}",
    ),
    "copy of a part": (lambda layer, x: copy(x, TP) * 1, (own,), {}, MIXED),
    "split of a part": (lambda layer, x: split(x, TP, -1) * 1, (own,), {}, MIXED),
    "gather_in of what is whole": (lambda layer, x: enter(x), (whole,), {"begins": False}, MIXED),
    "to_whole of what is whole": (
        lambda layer, x: to_whole(x, TP, 1, 2 * LENGTH),
        (whole,),
        {"begins": False, "ends": False},
        MIXED,
    ),
    "to_parts of a part": (lambda layer, x: to_parts(x, TP, 1), (own,), {}, MIXED),
    "scatter_out of a part": (
        lambda layer, x: leave(x * 1),
        (own,),
        {},
        "a: a module sums over tp a value that is whole on every rank",
    ),
    "reduce of a part": (
        lambda layer, x: reduce(x * 1, TP),
        (own,),
        {},
        "a: a module sums over tp a value that is whole on every rank",
    ),
    "a region around which a part goes": (
        lambda layer, x: leave(layer.product(enter(x)) + x[:, :1]),
        (own,),
        {},
        "a: a value computed with down.weight, which is sharded over tp, is one rank's part, but Add",
    ),
    "a region entered by nobody": (
        lambda layer, x: leave(layer.product(x)),
        (own,),
        {},
        "a: up.weight is sharded over tp but reads a value that has not entered a region",
    ),
    "entered twice": (
        lambda layer, x: leave(layer.product(enter(enter(x).sin()))),
        (own,),
        {},
        "a: a value enters a region twice",
    ),
    "made whole within a region": (
        lambda layer, x: to_whole(layer.product(enter(x)), TP, 1, LENGTH),
        (own,),
        {"ends": False},
        "a: a value computed with",
    ),
    "ends in parts": (block, (own,), {"ends": False}, MIXED),
    "ends whole": (lambda layer, x: to_whole(x, TP, 1, LENGTH), (own,), {}, MIXED),
    "ends inside": (lambda layer, x: layer.product(enter(x)), (own,), {}, "a: its output is one rank's part"),
    "nobody sums": (
        lambda layer, x: layer.norm(x),
        (own,),
        {"summed": False},
        "a: the whole parameter norm.weight is used inside a region",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_misuse_of_split_sequences_is_refused(name: str) -> None:
    run, inputs, claims, said = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        prove(run, *(make() for make in inputs), **claims)
    assert str(caught.value).startswith(said), str(caught.value)


@pytest.mark.parametrize("ends", [True, False])
def test_a_parameter_whose_gradient_is_summed_may_not_leave_the_layer(ends: bool) -> None:
    """Whoever reads it works on the whole: each rank has the whole gradient then, not a summand."""
    layer = Layer()
    x = own()
    outputs = [layer.norm(x) if ends else to_whole(layer.norm(x), TP, 1, LENGTH), layer.norm.weight * 1]
    claims = Claims(summed={"norm.weight", "norm.bias"}, input_in_parts=True, output_in_parts=ends)
    with pytest.raises(ModelError, match=r"^a: a value that is whole on every rank and a part"):
        prove_layer("a", [x], outputs, dict(layer.named_parameters()), claims)
