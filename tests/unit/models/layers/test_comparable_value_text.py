"""Texts of values are equal exactly where ranks may have made them apart, and they act alike."""

from __future__ import annotations

import enum
import functools
import io
import logging
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.models.layers.comparable_value_text import ValueTexts
from plait.models.result_cache import ResultCache


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Inner:
    window: tuple[int, ...] = (1, 2)


@dataclass
class Configuration:
    heads: int = 4
    inner: Inner = field(default_factory=Inner)


class Free:
    """Says what may be unlike."""

    differs_by_rank = ("rank",)

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size


class Trainer:
    def __init__(self, rank: int, factor: float = 1.0) -> None:
        self.rank, self.factor = rank, factor

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).mean() * self.factor


class Other(Trainer):
    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return output.mean() * self.factor


class Slotted:
    __slots__ = ("base",)

    def __init__(self, base: float) -> None:
        self.base = base


class Lazy:
    def __init__(self) -> None:
        self.base = 2.0

    @functools.cached_property
    def table(self) -> float:
        return self.base**2


def enclosing(value: Any) -> Any:
    return lambda x: x * value


def marked(rank: int) -> Any:
    function = enclosing(rank)
    function.differs_by_rank = ("value",)
    return function


def used(lazy: Lazy) -> Lazy:
    assert lazy.table
    return lazy


def recorder(before: int = 0) -> Any:
    """A hook that encloses its module, registered after as many others of the process, which count up."""
    module = nn.Linear(2, 2, device="meta")
    for _ in range(before):
        nn.Identity().register_forward_hook(_seen)
    module.register_forward_hook(lambda *_: setattr(module, "seen", True), with_kwargs=True)
    return next(iter(module._forward_hooks.values()))


def _seen(*_: object) -> None: ...


def holding_itself() -> list[Any]:
    held: list[Any] = [1]
    held.append(held)
    return held


def nesting(file: str, line: int) -> Any:
    """A function with code, and a set, among its constants, which stands in line `line` of `file`."""
    body = "\n" * line + "def outer(x):\n    return (lambda y: y in {3, 'a', None, 2.5})(x)"
    names: dict[str, Any] = {}
    exec(compile(body, file, "exec"), names)
    return names["outer"]


def text(value: Any) -> str:
    return ValueTexts().of(value)


ALIKE = {
    "numbers": (lambda: [1, 2.5, True, None, 1j, ..., range(3), slice(1, 2)], None),
    "containers": (lambda: {"a": [1, (2, {3, 4})], "b": frozenset("xyz")}, None),
    "dataclasses": (Configuration, None),
    "functions": (lambda: enclosing(2), None),
    "code in other places": (lambda: nesting("a.py", 1), lambda: nesting("b.py", 9)),
    "partial": (lambda: functools.partial(enclosing(2), x=torch.ones(2)), None),
    "tensors": (lambda: torch.arange(4.0), None),
    "arrays": (lambda: np.arange(4), None),
    "modules": (lambda: nn.Sequential(nn.LayerNorm(2), nn.ReLU()), None),
    "hooks that enclose their module": (recorder, lambda: recorder(1)),
    "paths": (lambda: "/scratch/rank0/log", lambda: "/scratch/rank1/log"),
    "declared": (lambda: Free(0), lambda: Free(1)),
    "declared for a function": (lambda: marked(0), lambda: marked(1)),
    "what a method does not read": (lambda: Trainer(0).loss, lambda: Trainer(1).loss),
    "lazy": (Lazy, lambda: used(Lazy())),
    "caches": (lambda: SimpleNamespace(_cos_cache=None), lambda: SimpleNamespace(_cos_cache=3)),
    "cache of results": (ResultCache, None),
    "devices": (lambda: torch.device("cuda", 0), lambda: torch.device("cuda", 1)),
    "locks": (threading.Lock, None),
    "loggers": (lambda: logging.getLogger("a"), lambda: logging.getLogger("b")),
    "files": (io.StringIO, None),
    "objects": (object, None),
    "generators": (torch.Generator, lambda: torch.Generator().manual_seed(3)),
    "holds itself": (holding_itself, None),
    "shared or not": (lambda: [[1]] * 2, lambda: [[1], [1]]),
    "meta or not": (lambda: torch.ones(2, device="meta"), None),
    "ordered": (lambda: OrderedDict(a=1, b=2), None),
}


def test_values_that_ranks_built_separately_have_the_same_text() -> None:
    for name, (one, other) in ALIKE.items():
        assert text(one()) == text((other or one)()), name
        assert "0x" not in text(one()), name


UNLIKE = {
    "numbers": (1, 2),
    "kinds of numbers": (1, 1.0),
    "truth": (1, True),
    "texts": ("tanh", "none"),
    "long texts": ("a" * 500 + "b", "a" * 500 + "c"),
    "enums": (Colour.RED, Colour.BLUE),
    "dtypes": (torch.float32, torch.float64),
    "functions": (torch.relu, torch.tanh),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "what is enclosed": (enclosing(1), enclosing(2)),
    "defaults": (lambda x, y=1: x + y, lambda x, y=2: x + y),
    "classes": (nn.ReLU, nn.GELU),
    "modules": (nn.LayerNorm(2), nn.LayerNorm(2, eps=1e-6)),
    "a module's function": (nn.Softmax(0), nn.Softmax(1)),
    "nested": (Configuration(), Configuration(inner=Inner((1, 3)))),
    "objects": (SimpleNamespace(a=SimpleNamespace(b=1)), SimpleNamespace(a=SimpleNamespace(b=2))),
    "undeclared": (Free(0), Free(0, 3)),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "what a method reads": (Trainer(0).loss, Trainer(0, 2.0).loss),
    "bits": (torch.zeros(2), -torch.zeros(2)),
    "shapes": (torch.zeros(2), torch.zeros(1, 2)),
    "arrays": (np.arange(3), np.arange(3) + 1),
    "order": ([1, 2], [2, 1]),
    "order of names": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "kinds of containers": ([1], (1,)),
    "sets": ({1}, {2}),
    "bytes": (b"a", b"b"),
    "patterns": (re.compile("a"), re.compile("b")),
    "partial functions": (functools.partial(torch.sum, dim=0), functools.partial(torch.sum, dim=1)),
    "partial functions' arguments": (functools.partial(max, 1), functools.partial(max, 2)),
    "keywords": (lambda x, *, y=1: x, lambda x, *, y=2: x),
    "methods of classes": (dict.fromkeys, OrderedDict.fromkeys),
    "a class's code": (Trainer(0), Other(0)),
    "dtypes of tensors": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
}


def test_values_that_act_differently_have_different_texts() -> None:
    for name, (one, other) in UNLIKE.items():
        assert text(one) != text(other), name


def test_containers_are_written_as_they_are_and_long_ones_by_their_size() -> None:
    held = [1, (2, "a"), {"b": None, 1.5: {4, 3}}, OrderedDict(c=True), frozenset(), Colour.RED]
    assert (
        text(held)
        == "[1, (2, 'a'), {'b': None, 1.5: {3, 4}}, OrderedDict{'c': True}, frozenset{}, Colour.RED]"
    )
    assert text([0] * 10**6) == "list of 1000000 items"
    assert text(dict.fromkeys(range(10**6))) == "dict of 1000000 items"


def test_a_global_float_that_a_function_reads_is_in_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: float) -> float:
        return x * SCALE

    before = text(scaled)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert text(scaled) != before


SCALE = 2.0


def test_the_text_of_deeply_nested_containers_is_bounded() -> None:
    held: Any = ()
    for _number in range(200):
        held = (held, held)
    assert len(text(held)) < 10**6
