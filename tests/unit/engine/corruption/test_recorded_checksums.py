"""What the program writes is known by torch's counts of writes; all other changes are reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flipped_bits import flip
from torch import Tensor, nn

from plait.engine.corruption.recorded_checksums import NamedTensor, RecordedChecksums, is_power_of_two


def recorded(*tensors: Tensor, moves: bool = False) -> RecordedChecksums:
    sums = RecordedChecksums()
    sums.record([NamedTensor(f"p{number}", "value", one, moves) for number, one in enumerate(tensors)])
    return sums


def changed(sums: RecordedChecksums) -> list[str]:
    return [str(one.named) for one in sums.compare()()]


@torch.no_grad()
def assigned(parameter: Tensor) -> None:
    parameter[0] = 7


def swapped(parameter: Tensor) -> None:
    parameter.data = torch.zeros(4)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda one: one.detach().add_(1),
    "by index": assigned,
    "a view": lambda one: one.detach()[1:].zero_(),
    "all at once": lambda one: torch._foreach_add_([one.detach()], 1.0),
    "other memory": swapped,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_of_the_program_is_no_change(write: Callable[[Tensor], object]) -> None:
    parameter, other = nn.Parameter(torch.ones(4)), torch.ones(3)
    sums = recorded(parameter, other)
    write(parameter)
    assert changed(sums) == []
    flip(other, 2, 3)
    assert changed(sums) == ["the value of p1"]


def test_a_write_through_data_or_numpy_is_reported_as_a_change() -> None:
    first, second = nn.Parameter(torch.ones(4)), torch.ones(2000)
    sums = recorded(first, second)
    first.data.add_(1)
    second.numpy()[5] = 2
    assert sorted(changed(sums)) == ["the value of p0", "the value of p1"]


def test_one_flipped_bit_is_told_from_several() -> None:
    large, small = torch.ones(2000), torch.ones(4)
    sums = recorded(large, small)
    flip(large, 11, 6)
    flip(small, 1, 1)
    flip(small, 9, 1)
    assert {str(one.named): one.is_one_bit for one in sums.compare()()} == {
        "the value of p0": True,
        "the value of p1": False,
    }
    assert [is_power_of_two(number) for number in (-(2**63), 2**40, 3, -5)] == [True, True, False, False]


def test_memory_that_moves_is_compared_where_it_is_now() -> None:
    parameter = nn.Parameter(torch.ones(4))
    sums = recorded(parameter, moves=True)
    parameter.data = parameter.data.clone()
    assert changed(sums) == []
    flip(parameter, 0, 0)
    assert changed(sums) == ["the value of p0"]


def test_recording_again_takes_what_is_there_as_right() -> None:
    tensor = torch.ones(2000)
    sums = recorded(tensor)
    tensor.numpy()[0] = 3
    sums.record([NamedTensor("p0", "value", tensor)])
    assert changed(sums) == []
    sums.forget()
    flip(tensor, 0, 0)
    assert changed(sums) == []
