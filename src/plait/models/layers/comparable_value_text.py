"""Python values as text, by which ranks compare their arguments: equal for values that act alike.

    numbers, texts, dtypes, enums       their value
    tensors, arrays                     dtype, shape and a hash of the bits
    functions                           name, defaults, what they enclose, and a hash of their code
    containers, modules, other objects  their items or attributes, likewise

An address, the order of a set and the device do not count, nor do attributes that only note how a rank came
to its object: see `attributes_of`.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.models.layers.layer_sequence import bits_of
from plait.models.result_cache import ResultCache
from plait.ranks.transport.call_description import describe

DIFFERS_BY_RANK = "differs_by_rank"
"""An attribute of a class, an object or a function: names of its attributes that need not be alike."""
_BOOKKEEPING = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "_is_hf_initialized"}
)
"""Attributes by which transformers notes where a model came from."""
_LONGEST_TEXT, _MOST_ITEMS, _DEEPEST = 200, 10_000, 12
_PLAIN = (bool, int, float, complex, type(None), type(Ellipsis), range, slice, Decimal, Fraction)
_COMMON = frozenset({bool, int, float, type(None)})
"""The most frequent of them, found without a look at base classes."""
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_CONTAINERS = (dict, MappingProxyType, list, tuple, set, frozenset, deque)
_CONFIGURING = (SimpleNamespace, re.Pattern)
_OWN_OPAQUE = ("plait.ranks", "plait.engine", "plait.app", "plait.checkpoint")


def attributes_of(thing: Any, besides: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the attributes of an object that ranks compare, sorted by name, without those in `besides`.

    Not those that `differs_by_rank` names, nor values of a `cached_property`, nor caches and hashes, by their
    names: they may be there on some ranks only, or be others in each process.
    """
    slots, lazy = _slots_and_lazy_names(type(thing))  # type: ignore[arg-type]  # classes are hashable
    held = dict(getattr(thing, "__dict__", {}))
    held |= {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    declared: Iterable[str] = held.get(DIFFERS_BY_RANK, getattr(type(thing), DIFFERS_BY_RANK, ()))
    free = {*declared, DIFFERS_BY_RANK, *_BOOKKEEPING, *lazy}
    names = sorted(held.keys() - besides - free)
    return {name: held[name] for name in names if not re.search("cache|hash", name.lower())}


@lru_cache(1024)
def _slots_and_lazy_names(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a class's slots, and those whose values a `cached_property` computes."""
    slots: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        slots += (own,) if isinstance(own, str) else own
    members = (item for base in kind.__mro__ for item in vars(base).items())
    lazy = tuple(name for name, value in members if isinstance(value, cached_property))
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__")), lazy


class ValueTexts:
    """Returns values as text, for comparison between ranks; objects that several values share occur once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._classes: dict[type, str] = {}
        self._kept: list[object] = []
        """What `_known` describes, so that no `id` is used again."""
        self._within: list[int] = []
        """The `id`s of the objects whose text is being made, outermost first."""

    def of(self, thing: Any) -> str:
        """Return the text of a value, on one line."""
        if type(thing) in _COMMON:
            return repr(thing)
        if isinstance(thing, Enum):
            return f"{type(thing).__qualname__}.{thing.name}"
        if isinstance(thing, str):
            return _text_of_string(thing)
        if isinstance(thing, _PLAIN):
            return repr(thing)
        if isinstance(thing, bytes | bytearray):
            return f"bytes {digest_of(bytes(thing))}"
        if isinstance(thing, _NAMED):
            return str(thing)
        if id(thing) in self._known:
            return self._known[id(thing)]
        if id(thing) in self._within or len(self._within) == _DEEPEST:
            return "..."
        self._within.append(id(thing))
        try:
            text = self._of_object(thing)
        except Exception:  # of any kind: objects of others, which may refuse to be looked at
            text = _name_of(type(thing))
        finally:
            self._within.pop()
        self._known[id(thing)] = text
        self._kept.append(thing)
        return text

    def of_class(self, kind: type) -> str:
        """Return a class's name as text, with a hash of its methods' code unless torch defines it."""
        if kind not in self._classes:
            code = [one for base in kind.__mro__ if not _is_library(base) for one in self._methods(base)]
            of_code = f" of code {digest_of(repr(code).encode())[:8]}" if code else ""
            self._classes[kind] = _name_of(kind) + of_code
        return self._classes[kind]

    def attributes(self, thing: object, names: frozenset[str] | None = None) -> str:
        """Return an object's attributes (all, or those in `names`) as text, separated by commas."""
        found = attributes_of(thing)
        if isinstance(thing, nn.Module):  # the keys of hooks count up in a process
            hooks = {name for name, one in found.items() if "_hooks" in name and isinstance(one, dict)}
            found |= {name: list(found[name].values()) for name in hooks}
        wanted = found if names is None else [name for name in found if name in names]
        return ", ".join(f"{name}={self.of(found[name])}" for name in wanted)

    def _of_object(self, thing: Any) -> str:
        if isinstance(thing, Tensor):
            return text_of_tensor(thing)
        if isinstance(thing, np.ndarray | np.generic):
            bits = "" if thing.dtype.hasobject else f" of bits {digest_of(thing.tobytes())}"
            return f"{thing.dtype}{list(thing.shape)}{bits}"
        if isinstance(thing, type):
            return _name_of(thing)
        if isinstance(thing, FunctionType | MethodType | BuiltinFunctionType | partial):
            return self._of_function(thing)
        if isinstance(thing, _CONTAINERS):
            return self._of_container(thing)
        kind = type(thing)
        is_foreign = _is_library(kind) or _is_opaque(kind)
        described = not is_foreign or isinstance(thing, (nn.Module, *_CONFIGURING))
        if not described or isinstance(thing, ResultCache | ModuleType):
            return _name_of(kind)
        if isinstance(thing, re.Pattern):
            return repr(thing.pattern)
        return f"{self.of_class(kind)}({self.attributes(thing)})"

    def _of_container(self, thing: Any) -> str:
        name = "" if type(thing) in (dict, list, tuple, set) else type(thing).__name__
        if len(thing) > _MOST_ITEMS:
            return f"{name or type(thing).__name__} of {len(thing)} items"
        if isinstance(thing, dict | MappingProxyType):
            pairs = [f"{self.of(key)}: {self.of(value)}" for key, value in thing.items()]
            return f"{name}{{{', '.join(pairs)}}}"
        items = [self.of(item) for item in thing]
        if isinstance(thing, set | frozenset):
            return f"{name}{{{', '.join(sorted(items))}}}"
        ends = "()" if isinstance(thing, tuple) else "[]"
        return f"{name}{ends[0]}{', '.join(items)}{ends[1]}"

    def _of_function(self, function: Any) -> str:
        if isinstance(function, partial):
            parts = (function.func, function.args, function.keywords)
            return f"partial({', '.join(map(self.of, parts))})"
        if isinstance(function, BuiltinFunctionType):
            return _name_of(function)
        if isinstance(function, MethodType):
            return self._of_method(function)
        if _is_library(function):
            return _name_of(function)
        free = {*getattr(function, DIFFERS_BY_RANK, ())}
        held = {name: one for name, one in self._enclosed(function) if name not in free}
        given = {**held, "defaults": function.__defaults__, "keywords": function.__kwdefaults__}
        shown = ", ".join(f"{name}={self.of(one)}" for name, one in given.items() if one is not None)
        code = f"{_name_of(function)} of code {_digest_of_code(function.__code__)}"
        return f"{code}({shown})" if shown else code

    def _of_method(self, method: MethodType) -> str:
        """Return the text of a bound method: of an object that is no module, the attributes that it reads."""
        owner, function = method.__self__, method.__func__
        code = getattr(function, "__code__", None)
        names = None if isinstance(owner, nn.Module) or code is None else frozenset(code.co_names)
        text = self.of(function)
        if isinstance(owner, type):
            return f"{text} of {_name_of(owner)}"
        if id(owner) in self._within or _is_opaque(type(owner)):
            return text
        return f"{text} of {_name_of(type(owner))}({self.attributes(owner, names)})"

    def _enclosed(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield what a function encloses, and the global numbers with a fraction that it reads, by name.

        Other globals do not count: whole numbers and texts may say which rank this is.
        """
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                yield name, None
        for name in function.__code__.co_names:
            if isinstance(function.__globals__.get(name), float):
                yield name, function.__globals__[name]

    def _methods(self, base: type) -> Iterator[str]:
        """Yield the name and code of each method, and the value of each number and text, of a class."""
        for name, value in vars(base).items():
            held = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            while isinstance(held, FunctionType):
                numbers = [(one, found) for one, found in self._enclosed(held) if isinstance(found, float)]
                yield f"{name} {_digest_of_code(held.__code__)} {numbers} {self.of(held.__defaults__)}"
                held = getattr(held, "__wrapped__", None)  # of a decorated method
            if isinstance(held, bool | int | float) and not name.startswith("__"):
                yield f"{name} {held!r}"


def text_of_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape as text, with a hash of its bits unless it is on meta.

    Nor for subclasses of `Tensor`, of which a rank may hold a shard.
    """
    kinds = (Tensor, nn.Parameter, nn.Buffer)
    if tensor.is_meta or type(tensor) not in kinds or tensor.layout is not torch.strided:
        return describe(tensor)
    return f"{describe(tensor)} of bits {digest_of(bits_of(tensor))}"


def _text_of_string(text: str) -> str:
    """Return the text of a string: its beginning and a hash, where it is long; of a path, that it is one."""
    if "/" in text or os.sep in text:
        return "a path"
    if len(text) <= _LONGEST_TEXT:
        return repr(text)
    return f"{text[:_LONGEST_TEXT]!r}... {digest_of(text.encode())}"


def _name_of(thing: Any) -> str:
    """Return the qualified name of a class or function; a script that was started has many."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", type(thing).__name__)
    return str(name) if module in (None, "builtins", "__main__", "__mp_main__") else f"{module}.{name}"


def _is_library(thing: Any) -> bool:
    """Return whether a class or function is torch's, NumPy's or Python's, whose versions are compared."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return root in ("torch", "numpy") or (root in sys.stdlib_module_names and root != "__main__")


def _is_opaque(kind: type) -> bool:
    """Return whether objects of a class belong to one rank, such as a mesh, an engine or a loader."""
    return (kind.__module__ or "").startswith(_OWN_OPAQUE)


def _digest_of_code(code: CodeType) -> str:
    return digest_of(_text_of_constant(code).encode())[:8]


def _text_of_constant(constant: Any) -> str:
    """Return the text of a constant; of code its instructions, constants and names, not where it stands."""
    if isinstance(constant, CodeType):
        code, constants = constant, [_text_of_constant(one) for one in constant.co_consts]
        return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_freevars} {code.co_cellvars}"
    if isinstance(constant, frozenset):
        return str(sorted(map(repr, constant)))
    return repr(constant)


def digest_of(data: bytes) -> str:
    """Return a hash of `data`: 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
