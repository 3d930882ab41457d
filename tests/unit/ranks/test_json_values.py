"""Values as text: what is read back is what was written, and nothing that a stranger writes is run."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import CheckpointError, CommunicationError
from plait.plan.layout import Box
from plait.plan.plan import Plan
from plait.ranks.group import Traffic
from plait.ranks.handle import GroupOperation
from plait.ranks.json_serialization import NotPlainError, decode, encode
from plait.schedules.action import Kind
from plait.verification.step_location import RecordKey

ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    ATOMS | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS),
)


@given(VALUES)
def test_containers_survive_encoding_and_decoding(value: Any) -> None:
    read = decode(encode(value))
    assert (read, type(read)) == (value, type(value))


TENSORS = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]


def test_tensors_survive_encoding_bit_for_bit() -> None:
    for dtype, shape in product(TENSORS, [(), (0,), (2, 3), (3, 0, 2)]):
        value = torch.linspace(-2, 2, math.prod(shape)).reshape(shape).to(dtype)
        expected = value.t() if len(shape) == 2 else value
        read = decode(encode({"a": expected}))["a"]
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in (read, expected)]
        assert torch.equal(*flat)


OWN = [
    Plan(pp=2, microbatches=4),
    RecordKey("output", 3, "a"),
    Box((0, 1), (2, 3)),
    CheckpointError("gone", damaged=True),
    Kind.B,
    frozenset({1, 2}),
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cuda:1"),
    Path("a/b"),
    np.float64(0.1),
    np.arange(6).reshape(2, 3),
    (np.zeros((0, 2), dtype=np.int16), math.nan, -math.inf),
]


def test_plaits_own_classes_survive_encoding_and_decoding() -> None:
    for value in OWN:
        read = decode(encode(value))
        assert type(read) is type(value)
        if isinstance(value, Exception):
            assert (read.args, vars(read)) == (value.args, vars(value))
        else:
            assert repr(read) == repr(value)
    decode(encode(OWN[-2]))[0, 0] = 5  # what is read can be written to


class OfTheUser:
    """Not one of plait's classes."""


class OfAUser(dict[str, int]):
    """A subclass, which would come back as a dict."""


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


OTHERS = {
    "OfTheUser": OfTheUser(),
    "OrderedDict": OrderedDict(),
    "OfAUser": OfAUser(),
    "builtin_function_or_method": os.getcwd,
    "Parameter": torch.nn.Parameter(torch.ones(1)),
    "Tensor": torch.ones(1, requires_grad=True),
    "ndarray": np.array(["text"]),
    "a list within itself": itself(),
    "type": object,
    "ABCMeta": Mapping,
    "plait.ranks.group.Traffic": Traffic(),
}


def test_values_of_other_classes_are_not_encoded() -> None:
    for told, value in OTHERS.items():
        with pytest.raises(NotPlainError) as refused:
            encode([value])
        assert str(refused.value) == told
    with pytest.raises(NotPlainError):
        encode(GroupOperation)


STRANGE: list[tuple[Any, str]] = [
    (["object", [["os", "system"], []]], "os is not plait's own"),
    (["object", [["plaits", "system"], []]], "plaits is not plait's own"),
    (["object", [["plait.__main__", "main"], []]], "'plait.__main__'"),
    (["object", [["plait.plan.plan", "os.system"], []]], "'os'"),
    (
        ["object", [["plait.ranks.json_serialization", "Path"], []]],
        "Path is no class of plait.ranks.json_serialization",
    ),
    (["object", [["plait.ranks.json_serialization", "encode"], []]], "encode is no class of"),
    (["object", [["plait.plan.plan", "Plan"], [["pp", 2]]]], "Plan has the fields ['pp', "),
    (["object", [["plait.plan.layout", "Box"], [["low", 1], ["low", 2]]]], "Box"),
    (["named", [["plait.verification.step_location", "RecordKey"], [1, 2, 3, 4]]], "takes"),
    (["named", [["plait.plan.plan", "Plan"], []]], "Plan is no class of plait.plan.plan"),
    (["error", [["builtins", "SystemExit"], ["tuple", []], ["dict", []]]], "builtins is not plait's own"),
    (
        ["error", [["plait.plan.plan", "Plan"], ["tuple", []], ["dict", []]]],
        "Plan is no class of plait.plan.plan",
    ),
    (["enum", [["plait.errors", "PlaitError"], "a"]], "PlaitError is no class of plait.errors"),
    (["array", ["|O", [1], "AAAAAAAAAAA="]], "|O is no dtype of numbers"),
    (["tensor", ["load", [1], ""]], "load is no dtype"),
    (["tensor", ["float32", [1000], "AAAA"]], ""),
    (["lambda", 1], "'lambda'"),
    (["list", 3], ""),
    ([[]], ""),
    ({"a": 1}, ""),
]


def test_forged_text_is_refused_and_executes_nothing() -> None:
    for tree, told in STRANGE:
        with pytest.raises(CommunicationError, match="a value of another rank cannot be read") as refused:
            decode(json.dumps(tree))
        assert told in str(refused.value), (tree, str(refused.value))


def test_truncated_text_is_refused() -> None:
    for text in ("", "[" * 100_000, '["list", [1'):
        with pytest.raises(CommunicationError):
            decode(text)
