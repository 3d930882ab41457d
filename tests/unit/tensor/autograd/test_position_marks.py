from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.tensor.dropout_mask import keep_mask
from plait.tensor.position_marks import MarkedCall, call_begins, call_ends, gives_positions, positions_may_mix


@positions_may_mix(2, "query")
def doubled(query: Tensor, factor: float = 2.0) -> Tensor:
    """Twice the query."""
    return query * factor


@gives_positions
def numbers(length: int) -> Tensor:
    if length < 0:
        raise ValueError("negative")
    return torch.arange(length)


class Calls(TorchFunctionMode):
    """Notes calls of marked functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.last: MarkedCall | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (call_begins, call_ends):
            (self.last,) = args
            self.seen.append((func.__name__, args[0].function.__name__))
            return None
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_where_a_marked_call_begins_and_ends() -> None:
    query = torch.ones(2)
    with Calls() as calls:
        result = doubled(query, factor=3.0)
    assert calls.seen == [("call_begins", "doubled"), ("call_ends", "doubled")]
    assert calls.last is not None
    assert (calls.last.mark.dim, calls.last.mark.arguments) == (2, ("query",))
    assert calls.last.args == (query,)
    assert calls.last.kwargs == {"factor": 3.0}
    assert calls.last.result is result


def test_a_marked_call_that_raises_ends_without_a_result() -> None:
    with Calls() as calls, pytest.raises(ValueError, match="negative"):
        numbers(-1)
    assert [name for name, _ in calls.seen] == ["call_begins", "call_ends"]
    assert calls.last is not None
    assert calls.last.result is None


def test_marked_functions_without_tensor_arguments_are_seen() -> None:
    with Calls() as calls:
        numbers(3)
        keep_mask(0, (2, 3), 0.5, {}, torch.device("cpu"))
    assert [name for _, name in calls.seen] == ["numbers"] * 2 + ["keep_mask"] * 2


def test_a_default_device_holds_inside_a_marked_function() -> None:
    with torch.device("meta"):
        assert numbers(3).is_meta
        with Calls() as calls:
            assert numbers(3).is_meta
    with Calls(), torch.device("meta"):
        assert numbers(3).is_meta
    assert len(calls.seen) == 2


def test_without_a_mode_a_marked_function_behaves_and_compiles_as_unmarked() -> None:
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert doubled.__doc__ == "Twice the query."
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
