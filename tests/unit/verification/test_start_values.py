"""The values that both sides start from: moved a little, by name; the model that was given stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parity.models import buffers, on_meta, repeated, tied_table
from plait.models.layers.layer_sequence import bits_of
from plait.verification.reference.start_values import (
    OFFSET,
    OFFSET_OF_ZEROS,
    ValueChange,
    add_offsets,
    unchanged,
    with_values,
)


def test_a_parameter_moves_by_a_tenth_of_its_size() -> None:
    value = torch.full((4000,), 3.0)
    move = (add_offsets(0)("a", value) - value).double()
    assert 0.9 < float(move.std()) / (OFFSET * 3.0) < 1.1
    assert abs(float(move.mean())) < 0.03


def test_a_parameter_of_zeros_moves_too() -> None:
    move = add_offsets(0)("bias", torch.zeros(4000))
    assert 0.9 < float(move.std()) / OFFSET_OF_ZEROS < 1.1


def test_moves_depend_on_the_name_and_the_seed_alone() -> None:
    """The offsets that `add_offsets` adds to start values."""
    value = torch.ones(8)
    first = add_offsets(0)("a", value)
    assert torch.equal(first, add_offsets(0)("a", value))
    assert not torch.equal(first, add_offsets(0)("b", value))
    assert not torch.equal(first, add_offsets(1)("a", value))


def test_start_values_keep_shape_and_dtype() -> None:
    for value in (torch.ones(2, 3).bfloat16(), torch.tensor(0.5), torch.empty(0, 2), torch.ones(3).double()):
        changed = add_offsets(0)("a", value)
        assert (changed.shape, changed.dtype) == (value.shape, value.dtype)


def made(model: nn.Module) -> nn.Module:
    return with_values(model, 0, add_offsets(0), unchanged)


@pytest.mark.parametrize("change", [add_offsets(0), unchanged])
def test_the_model_given_is_not_altered(change: ValueChange) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {name: bits_of(value) for name, value in model.state_dict().items()}
    parameters = list(map(id, model.parameters()))
    start = with_values(model, 0, change, unchanged)
    assert {name: bits_of(value) for name, value in model.state_dict().items()} == before
    assert list(map(id, model.parameters())) == parameters
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.zero_()
    assert {name: bits_of(value) for name, value in model.state_dict().items()} == before


def test_start_values_of_norms_are_neither_zero_nor_one() -> None:
    start = made(nn.Sequential(nn.LayerNorm(64)))
    assert not any(((parameter == 0) | (parameter == 1)).any() for parameter in start.parameters())


def test_a_model_on_the_meta_device_gets_values() -> None:
    model = on_meta()
    start = made(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in start.parameters())
    assert torch.equal(start[0].weight, made(on_meta())[0].weight)  # type: ignore[index]


def test_start_values_keep_tied_parameters_tied() -> None:
    shared = made(repeated())
    assert shared[0] is shared[2] is shared[4]  # type: ignore[index]
    tied = made(tied_table())
    assert tied[3].table is tied[0].weight  # type: ignore[index]
    assert len(list(tied.parameters())) == len(list(tied_table().parameters()))


def test_start_values_keep_frozen_parameters_frozen() -> None:
    model = tied_table()
    assert [p.requires_grad for p in made(model).parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


def test_buffers_change_as_told_unless_they_are_whole_numbers() -> None:
    seen = []

    def change(name: str, value: Tensor) -> Tensor:
        seen.append(name)
        return value + 1

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = buffers()
    start = with_values(model, 0, unchanged, change)
    assert seen == ["0.shift", "0.factor", "2.shift", "2.factor"]
    assert torch.equal(start[0].shift, model[0].shift + 1)  # type: ignore[index]
    assert torch.equal(start[0].permutation, model[0].permutation)  # type: ignore[index]
    assert torch.equal(start[0].linear.weight, model[0].linear.weight)  # type: ignore[index]
    assert "0.factor" not in start.state_dict()  # it is still one that is not saved


def test_start_values_do_not_advance_torchs_generator() -> None:
    model = repeated()
    before = torch.random.get_rng_state()
    made(model)
    made(on_meta())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_integer_and_empty_tensors_keep_their_start_values() -> None:
    change = add_offsets(0)
    for value in (torch.arange(5), torch.ones(2, dtype=torch.bool)):
        assert change("any", value) is value
    assert change("none", torch.empty(0, 3)).shape == (0, 3)
