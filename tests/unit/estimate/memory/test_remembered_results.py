"""Operations on the meta device that take remembered results give what they give without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn import functional

from plait.estimate.memory.remembered_results import RememberedResults


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(value: Any) -> Any:
    """Return shapes, strides, dtypes and numbers of storages of a result, and of what it was made from."""
    if isinstance(value, (list, tuple)):
        return [*map(described, value)]
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, storage.nbytes()


def shared(values: list[Tensor]) -> list[list[bool]]:
    """Return which of the tensors share memory."""
    return [[one.untyped_storage() is two.untyped_storage() for two in values] for one in values]


X, W, N = (4, 6), (8, 6), (4,)
CALLS: dict[str, Callable[[], Any]] = {
    "integer times an integer": lambda: made(X, torch.int32) * 2,
    "integer times a float": lambda: made(X, torch.int32) * 2.0,
    "integer times True": lambda: made(X, torch.int32) * True,
    "transposed": lambda: made(X).t().exp(),
    "broadcast": lambda: made(X) + made((6,), torch.float64),
    "product": lambda: functional.linear(made((2, *X)), nn.Parameter(made(W))),
    "joined": lambda: torch.cat([made(X), made(X)], 1),
    "of another dtype": lambda: made(X).to(torch.bfloat16),
    "of the same dtype": lambda: made(X).to(torch.float32),
    "two results": lambda: torch.max(made(X), dim=1),
    "negative log-likelihood": lambda: functional.nll_loss(made(X), made(N, torch.int64)),
    "over an argument": lambda: torch.logaddexp(one := made(X), made(X), out=one),
    "in a list": lambda: torch._foreach_add([made(X), made(N)], 1.0),
    "with gaps": lambda: torch.empty_strided(X, (8, 1), device="meta") * 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_like_that_of_the_operation(name: str) -> None:
    expected = described(CALLS[name]())
    with RememberedResults():
        first, second = CALLS[name](), CALLS[name]()
    assert described(first) == described(second) == expected
    assert not isinstance(first, Tensor) or first is not second


def test_writes_go_to_the_argument_and_are_counted() -> None:
    with RememberedResults():
        for _ in range(2):
            one = made(X)
            assert one.add_(1.0) is one
            assert one._version == 1
            two = made(X)
            torch.log_softmax(two, 1, out=two)
            assert two._version == 1


def test_parts_of_an_arguments_memory_stay_parts() -> None:
    with RememberedResults():
        for _ in range(2):
            one = made(X)
            parts = [one, one.view(24), one[1], torch.ops.aten._unsafe_view(one, [6, 4]), one * 2]
            assert shared(parts) == [[(a < 4 and b < 4) or a == b for b in range(5)] for a in range(5)]
            assert parts[2].storage_offset() == 6


def test_an_operation_that_reshapes_its_argument_runs_each_time() -> None:
    with RememberedResults():
        for _ in range(2):
            one = made(X)
            one.t_()
            assert one.shape == (6, 4)
            two = made((0,))
            torch.mul(made(X), 2, out=two)
            assert two.shape == X


def test_an_operation_that_gives_its_argument_other_memory_runs_each_time() -> None:
    with RememberedResults():
        for _ in range(2):
            one, two = made(X), made(X)
            one.set_(two)  # type: ignore[call-overload]
            assert shared([one, two]) == [[True, True], [True, True]]
            part = made((100,))[:8]
            part.as_strided_((8,), (1,), 16)
            assert part.storage_offset() == 16


def test_results_have_the_default_dtype_of_their_call(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    with RememberedResults():
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found = torch.ones(3, device="meta"), made(N, torch.int32) * 2.0
            assert [one.dtype for one in found] == [dtype, dtype]


def test_random_numbers_of_a_cpu_are_drawn_once() -> None:
    drawn = []
    for mode in (nullcontext(), RememberedResults()):
        torch.manual_seed(0)
        with mode:
            drawn.append(torch.randperm(97).tolist())
    assert drawn[0] == drawn[1]


def test_writes_to_the_tensors_of_a_list_are_counted() -> None:
    with RememberedResults():
        for _ in range(2):
            one = made(X)
            torch._foreach_mul_([one], 2.0)
            assert one._version == 1


def test_operators_that_call_others_run() -> None:
    with RememberedResults():
        product = out_dtype(
            torch.ops.aten.mm.default, torch.int32, made((4, 4), torch.int8), made((4, 4), torch.int8)
        )
    assert product.dtype == torch.int32


def test_errors_are_those_of_the_operation_and_other_devices_compute() -> None:
    with RememberedResults():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast"):
                made(X) + made((5,))
            assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_gradients_flow_through_remembered_results() -> None:
    for _ in range(2):
        weight = nn.Parameter(made(W))
        with RememberedResults():
            functional.linear(made(X), weight).square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == W
