"""What plait relies on of torch's operations on many tensors, whose names are private."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.autograd import private_torch_functions
from plait.tensor.autograd.private_torch_functions import (
    add_each,
    counts_all_writes,
    multiply_each,
    zero_each,
)


def test_multi_tensor_operations_accept_an_empty_list() -> None:
    zero_each([])
    multiply_each([], torch.tensor(2.0))
    add_each([], [])


def test_multi_tensor_operations_change_tensors_in_place() -> None:
    tensors = [torch.ones(3), torch.ones(()), torch.ones(0)]
    multiply_each(tensors, torch.tensor(3.0))
    assert [one.sum().item() for one in tensors] == [9, 3, 0]
    zero_each(tensors)
    assert not any(one.any() for one in tensors)


class Passing(TorchDispatchMode):
    """Hands every operation on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_writes_of_multi_tensor_operations_are_counted_also_where_torch_does_not_count_them() -> None:
    def write(tensors: list[torch.Tensor]) -> None:
        zero_each(tensors)
        multiply_each(tensors, torch.tensor(3.0))
        add_each(tensors, [torch.ones(3), torch.ones(2)])

    outside, within, of_torch = ([torch.ones(3), torch.ones(2)] for _ in range(3))
    write(outside)
    with Passing():
        assert not counts_all_writes()
        write(within)
        torch._foreach_zero_(of_torch)
    assert counts_all_writes()
    assert [one._version for one in (*outside, *within)] == [3] * 4
    assert [one._version for one in of_torch] == [0, 0], "torch counts them: plait need not"


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize(
    "dtypes", [["float32"] * 3, ["bfloat16"] * 3, ["bfloat16", "float32", "float64"]], ids=str
)
def test_a_gradient_of_another_dtype_is_added_with_the_digits_of_the_total(
    monkeypatch: pytest.MonkeyPatch, dtypes: list[str], on_accelerator: bool
) -> None:
    """On a GPU gradients are cast together before, since unlike dtypes would be added one by one."""
    monkeypatch.setattr(private_torch_functions, "is_accelerator", lambda tensor: on_accelerator)
    torch.manual_seed(0)
    totals = [torch.randn(5), torch.randn(()), torch.randn(2, 3)]
    if "float64" in dtypes:
        totals[2] = totals[2].double()
    gradients = [
        torch.randn(one.shape, dtype=torch.float64).to(getattr(torch, name))
        for one, name in zip(totals, dtypes, strict=True)
    ]
    expected = [total + one.to(total.dtype) for total, one in zip(totals, gradients, strict=True)]
    add_each(totals, gradients)
    assert all(torch.equal(total, one) for total, one in zip(totals, expected, strict=True))
