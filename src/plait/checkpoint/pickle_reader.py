"""`read_pickle`: the values in a pickle, in time and memory that its length bounds; nothing in it is called.

`pickle.Unpickler` would not do, even one that finds no class: it allocates the gigabytes that ten bytes may
ask for, and hashes nested tuples, as keys of dictionaries, for ever.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PickledClass:
    """The name of a class or function in a pickle."""

    module: str
    name: str


class PickledObject:
    """An object in a pickle: its class, constructor arguments and state; equal to itself only."""

    def __init__(self, kind: PickledClass, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None


_VALUES = {"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"} | {
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = {"PROTO", "FRAME", "STOP"}


def read_pickle(data: bytes, find: Callable[[str, str], object]) -> Any:
    """Return the value of a pickle, of numbers, texts, tuples, lists, dictionaries and `PickledObject`s.

    `find(module, name)` returns what stands for a class or function; it may refuse it by an exception.
    Damaged pickles, and instructions that plain data do not need, raise any kind of exception.
    """
    machine = _Machine(find)
    for opcode, argument, _ in pickletools.genops(data):
        machine.run(opcode.name, argument)
    return machine.stack.pop()


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, find: Callable[[str, str], object]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._find = find

    def run(self, name: str, argument: Any) -> None:
        """Execute one pickle opcode on the stack."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):
            self._collect(name, self._since_mark())
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            self._collect(f"{name}S", items)
        elif name not in _NOTHING:
            self._make(name, argument)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _collect(self, name: str, items: list[Any]) -> None:
        if name in ("TUPLE", "LIST"):
            self.stack.append(tuple(items) if name == "TUPLE" else items)
        elif name == "APPENDS":
            _of(self.stack[-1], list).extend(items)
        else:
            if name == "DICT":
                self.stack.append({})
            for key in items[::2]:
                _of(key, str, int, PickledObject)
            _of(self.stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))

    def _make(self, name: str, argument: Any) -> None:
        """Execute an opcode that names a class or builds an object; nothing is imported or called."""
        stack = self.stack
        if name == "GLOBAL":
            module, _, found = argument.partition(" ")
            stack.append(self._find(module, found))
        elif name == "STACK_GLOBAL":
            found, module = _of(stack.pop(), str), _of(stack.pop(), str)
            stack.append(self._find(module, found))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, kind = _of(stack.pop(), tuple), _of(stack.pop(), PickledClass)
            stack.append(PickledObject(kind, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _of(stack[-1], PickledObject).state = state
        else:
            raise ValueError(f"a pickle of plain data has no instruction {name}")


def _of(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__} stands for a {kinds[0].__name__}")
    return value
