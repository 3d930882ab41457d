"""Pickling of functions and arguments for processes that do not import the caller's main module."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import cloudpickle
from torch import Tensor

from plait.errors import ModelError, PlaitError
from plait.ranks.gradient_hooks import first_gradient_hook

FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which also records the objects of the main module that it pickles by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Record an object of the main module; `pickle` calls this method for each object of a class.

        Raises ModelError for a tensor with hooks on its gradient, which the pickled one would not have.
        """
        hook = first_gradient_hook({"": thing}) if isinstance(thing, Tensor) else None
        if hook is not None:
            raise ModelError(
                f"a tensor {list(thing.shape)} has a hook of {hook[1]}, which would not reach the ranks' "
                "processes: register it in the function that the ranks run."
            )
        if _is_in_main(thing):
            outermost = thing.__qualname__.partition(".")[0]
            self.of_main[outermost] = getattr(sys.modules["__main__"], outermost)
            self.of_main.setdefault(thing.__name__, thing)  # cloudpickle forgets where a class was nested
        return super().reducer_override(thing)


def dumps_call(call: FunctionCall) -> bytes:
    """Return `call` as bytes, with the classes and functions of the main module that it needs, by value.

    Raises the errors of `cloudpickle` for objects that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(call)
    pickler.dump(dict(pickler.of_main))  # the same objects, since a pickler keeps a memo
    return file.getvalue()


def loads_call(data: bytes) -> FunctionCall:
    """Unpickle a call, and add the caller's main-module classes and functions it needs to this main module.

    `pickle` looks them up there by name: when a worker of a `DataLoader` sends a batch of a class of the main
    module, or when `torch.save` writes a model.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    call: FunctionCall = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    return call


def dumps_result(result: object, rank: int) -> bytes:
    """Return a rank's result as bytes. Raises `PlaitError` where it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise PlaitError(
            f"rank {rank}'s result, of type {type(result).__name__}, cannot be sent to other processes "
            f"({error}): return numbers, text, tensors and containers of them."
        ) from error
    return data


def _is_in_main(thing: Any) -> bool:
    """Return whether `thing` is a class or function that `pickle` finds by name in the main module."""
    if getattr(thing, "__module__", None) != "__main__" or not hasattr(thing, "__qualname__"):
        return False
    try:
        return attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False
