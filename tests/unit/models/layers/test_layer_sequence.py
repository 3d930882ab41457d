from __future__ import annotations

import io
import math
import queue
import threading
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.layers.layer_sequence import (
    MISSING,
    aliases_of,
    layer_costs,
    private_copy,
    sequence_of,
    set_attributes,
)


def paths(model: nn.Module) -> list[str]:
    return [layer.path for layer in sequence_of(model).layers]


def test_nested_sequentials_are_flattened() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Tanh()))
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), inner=inner, nothing=nn.Sequential()))
    assert paths(model) == ["first", "inner.0", "inner.1.0", "inner.1.1"]
    sequence = sequence_of(model)
    assert list(sequence.parameters) == [name for name, _ in model.named_parameters()]
    assert sequence.users == {
        "first.weight": (0,),
        "first.bias": (0,),
        "inner.0.weight": (1,),
        "inner.0.bias": (1,),
    }
    assert sequence.unit_of("inner.0.bias") == "inner.0"


def test_any_other_module_is_one_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input + super().forward(input)

    assert paths(nn.Linear(2, 2)) == [""]
    assert list(sequence_of(nn.Linear(2, 2)).parameters) == ["weight", "bias"]
    assert paths(nn.Sequential(Residual(nn.Linear(2, 2)))) == ["0"]


def test_a_module_that_stands_twice_runs_twice_and_is_tied() -> None:
    shared = nn.Linear(2, 2)
    sequence = sequence_of(nn.Sequential(shared, nn.ReLU(), shared))
    assert [layer.path for layer in sequence.layers] == ["0", "1", "2"]
    assert sequence.users == {"0.weight": (0, 2), "0.bias": (0, 2)}
    assert sequence.unit_of("0.weight") == "0.weight"


def test_a_tied_parameter_is_a_unit_of_its_own() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    sequence = sequence_of(model)
    assert sequence.users == {"0.weight": (0, 1), "1.bias": (1,)}
    assert [sequence.unit_of(name) for name in sequence.users] == ["0.weight", "1"]


def test_a_parameter_used_twice_within_a_layer_is_no_tie() -> None:
    layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    layer[1].weight = layer[0].weight
    sequence = sequence_of(nn.Sequential(layer, nn.Linear(2, 2), layer[0]))
    assert sequence.users == {
        "0.0.weight": (0, 2),
        "0.0.bias": (0, 2),
        "0.1.bias": (0,),
        "1.weight": (1,),
    } | {"1.bias": (1,)}
    assert aliases_of(sequence.layers) == {
        "0.1.weight": "0.0.weight",
        "2.weight": "0.0.weight",
        "2.bias": "0.0.bias",
    }
    assert aliases_of(sequence_of(nn.Sequential(nn.Linear(2, 2))).layers) == {}


def test_attributes_are_set_to_copies_and_missing_ones_deleted() -> None:
    module, value = nn.Sequential(nn.Linear(2, 2)), torch.ones(2)
    set_attributes(module, {"0.scale": value, "kind": "a", "0.none": MISSING, "0.bias": MISSING})
    assert torch.equal(module[0].scale, value)
    assert module[0].scale is not value
    assert (module.kind, hasattr(module[0], "bias"), hasattr(module[0], "none")) == ("a", False, False)


@pytest.mark.parametrize("model", [torch.zeros(2), None, [nn.Linear(2, 2)], nn.Linear])
def test_a_model_that_is_no_module_is_refused(model: object) -> None:
    with pytest.raises(ModelError, match=rf"the model is a {type(model).__name__}: give an nn.Module"):
        sequence_of(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.Sequential(), nn.Sequential())])
def test_an_empty_sequential_is_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"empty nn\.Sequential: give it at least one layer"):
        sequence_of(model)


def test_a_private_copy_shares_locks_files_and_modules_of_python() -> None:
    layer = nn.Linear(2, 2)
    held = threading.Lock(), threading.Event(), queue.Queue(), io.BytesIO(), math  # type: ignore[var-annotated]
    vars(layer).update({f"held{number}": one for number, one in enumerate(held)})
    (copy,) = private_copy(sequence_of(layer).layers, {id(one): one.clone() for one in layer.parameters()})
    assert all(getattr(copy.module, f"held{number}") is one for number, one in enumerate(held))


def test_a_private_copy_stands_on_other_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sequence = sequence_of(model)
    tensors = {id(t): torch.full_like(t, 7) for t in model.buffers()}
    tensors |= {id(p): nn.Parameter(torch.full_like(p, 7)) for p in model.parameters()}
    copies = private_copy(sequence.layers, tensors)
    assert [layer.path for layer in copies] == ["0", "1", "2"]
    assert copies[0].module.weight is copies[2].module.weight is tensors[id(model[0].weight)]
    assert copies[1].module.running_mean is tensors[id(model[1].running_mean)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not {id(layer.module) for layer in copies} & {id(module) for module in model.modules()}


class Dear(nn.Linear):
    def cost(self) -> float:
        return 7


def test_cost_is_the_elements_of_matrices_or_what_the_layer_says() -> None:
    layers = [
        nn.Linear(3, 4),  # the bias costs next to nothing
        nn.Embedding(100, 3),  # a look-up too
        nn.ReLU(),
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 5)]),
        Dear(30, 30),
    ]
    assert layer_costs(sequence_of(nn.Sequential(*layers)).layers) == [13.0, 1.0, 1.0, 15.0, 7.0]
