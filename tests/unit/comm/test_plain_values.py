"""Values as text: what is read back is what was written, and nothing that a stranger writes is run."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.comm.operation_error import GroupOperation
from plait.comm.plain_values import NotPlainError, decode, encode
from plait.errors import CheckpointError, CommunicationError
from plait.layout import Box
from plait.plan import Plan
from plait.verification.location import RecordKey

ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    ATOMS | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS),
)


@given(VALUES)
def test_containers_are_read_as_they_were(value: Any) -> None:
    read = decode(encode(value))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 0, 2)])
def test_tensors_are_read_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.linspace(-2, 2, math.prod(shape)).reshape(shape).to(dtype)
    read = decode(encode({"a": value.t() if len(shape) == 2 else value}))["a"]
    expected = value.t() if len(shape) == 2 else value
    assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
    flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in (read, expected)]
    assert torch.equal(*flat)


@pytest.mark.parametrize(
    "value",
    [
        Plan(pp=2, microbatches=4),
        RecordKey("output", 3, "a"),
        Box((0, 1), (2, 3)),
        CheckpointError("gone", damaged=True),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cuda:1"),
        Path("a/b"),
        np.float64(0.1),
        (np.arange(6).reshape(2, 3), math.nan, -math.inf),
    ],
    ids=lambda value: type(value).__name__,
)
def test_own_classes_are_read_as_they_were(value: Any) -> None:
    read = decode(encode(value))
    assert type(read) is type(value)
    if isinstance(value, Exception):
        assert (read.args, vars(read)) == (value.args, vars(value))
    else:
        assert repr(read) == repr(value)


class OfTheUser:
    """Not one of plait's classes."""


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        OfTheUser(),
        OrderedDict(),
        os.getcwd,
        torch.nn.Parameter(torch.ones(1)),
        itself(),
        object,
        GroupOperation,
    ],
    ids=["user", "ordered", "function", "parameter", "itself", "type", "own type"],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode([value])


@pytest.mark.parametrize(
    "tree",
    [
        ["object", [["os", "system"], []]],
        ["object", [["plait.__main__", "main"], []]],
        ["object", [["plait.plan", "os.system"], []]],
        ["object", [["plait.comm.plain_values", "Path"], [["a", 1]]]],
        ["object", [["plait.plan", "Plan"], [["pp", 2]]]],
        ["named", [["plait.verification.location", "RecordKey"], [1, 2, 3, 4]]],
        ["error", [["builtins", "SystemExit"], ["tuple", []], ["dict", []]]],
        ["enum", [["plait.errors", "PlaitError"], "a"]],
        ["array", ["|O", [1], "AAAAAAAAAAA="]],
        ["tensor", ["load", [1], ""]],
        ["tensor", ["float32", [1000], "AAAA"]],
        ["lambda", 1],
        ["list", 3],
        [[]],
        {"a": 1},
    ],
    ids=str,
)
def test_text_of_strangers_is_an_error_and_runs_nothing(tree: Any) -> None:
    with pytest.raises(CommunicationError, match="a value of another rank cannot be read"):
        decode(json.dumps(tree))


def test_text_without_end_is_an_error() -> None:
    for text in ("", "[" * 100_000, '["list", [1'):
        with pytest.raises(CommunicationError):
            decode(text)
