"""Functions and their arguments as bytes, for other processes that do not import the caller's main module."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import cloudpickle

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which also notes what of the main module it has written by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Called by `pickle` for each class and function, among others."""
        if _is_in_main(thing):
            outermost = thing.__qualname__.partition(".")[0]
            self.of_main[outermost] = getattr(sys.modules["__main__"], outermost)
            self.of_main.setdefault(thing.__name__, thing)  # cloudpickle forgets where a class was nested
        return super().reducer_override(thing)


def dumps_call(call: FunctionCall) -> bytes:
    """Return `call` as bytes, with the classes and functions of the main module that it needs, by value.

    Raises what `cloudpickle` raises for what cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(call)
    pickler.dump(dict(pickler.of_main))  # the same objects: a pickler remembers what it has written
    return file.getvalue()


def loads_call(data: bytes) -> FunctionCall:
    """Return the call in `data`, and put what it needs of the caller's main module in this process's.

    There `pickle` looks for it by name: when a worker of a `DataLoader` sends a batch of a class of the main
    module, when `torch.save` writes a model.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    call: FunctionCall = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    return call


def _is_in_main(thing: Any) -> bool:
    """Whether `pickle` would look for a class or function in the main module, and find it there."""
    if getattr(thing, "__module__", None) != "__main__" or not hasattr(thing, "__qualname__"):
        return False
    try:
        return attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False
