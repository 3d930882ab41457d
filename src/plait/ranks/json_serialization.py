"""Values as JSON text: numbers, text, tensors, containers of them, and plait's own dataclasses and errors.

Reading such text runs no code that the sender chose, unlike a pickle: a class is one of plait's own that
holds values, and none of its methods is called.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch

from plait.errors import CommunicationError, PlaitError

_ATOMS = (type(None), bool, int, float, str)
_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_OWN = re.compile(r"plait(\.\w+)*")
_NUMPY_KINDS = "biufc"


class NotPlainError(TypeError):
    """Raised for a value of a type that `encode` does not know; the message is the type's name."""


def encode(value: object) -> str:
    """Return `value` as JSON text that `decode` reads. Raises `NotPlainError` for unknown types.

    Tensors are read on the CPU afterwards. Subclasses count as other types, and so do tensors that require
    gradients.
    """
    try:
        return json.dumps(_tree(value))
    except RecursionError:
        raise NotPlainError(f"a {type(value).__name__} within itself") from None


def decode(text: str) -> Any:
    """Return the value that `encode` made `text` from. Raises `CommunicationError` for other text."""
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise CommunicationError(f"a value of another rank cannot be read ({error})") from None


def _tree(value: Any) -> Any:
    """Return `value` as JSON data: numbers and text as they are, others as [tag, content]."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return [kind.__name__, [_tree(one) for one in value]]
    if kind is dict:
        return ["dict", [[_tree(key), _tree(one)] for key, one in value.items()]]
    if kind is bytes:
        return ["bytes", _text(value)]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is torch.Tensor and value.layout is torch.strided and not value.requires_grad:
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", [str(value.dtype).removeprefix("torch."), list(value.shape), _text(data)]]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY_KINDS:
        name = "array" if kind is np.ndarray else "scalar"
        return [name, [value.dtype.str, list(value.shape), _text(value.tobytes())]]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is PosixPath:
        return ["path", str(value)]
    if _OWN.fullmatch(kind.__module__):
        return _tree_of_own(value, [kind.__module__, kind.__qualname__])
    raise NotPlainError(kind.__name__)


def _tree_of_own(value: Any, name: list[str]) -> Any:
    """Return the JSON of an object of one of plait's own classes, which has this `name`."""
    if isinstance(value, Enum):
        return ["enum", [name, value.name]]
    if isinstance(value, PlaitError):
        return ["error", [name, _tree(value.args), _tree(vars(value))]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", [name, [_tree(one) for one in value]]]
    if is_dataclass(value):
        return ["object", [name, [[one.name, _tree(getattr(value, one.name))] for one in fields(value)]]]
    raise NotPlainError(".".join(name))


def _value(tree: Any) -> Any:
    if type(tree) in _ATOMS:
        return tree
    tag, held = tree
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([_value(one) for one in held])
    return _READERS[tag](held)


def _tensor(held: Any) -> torch.Tensor:
    name, shape, text = held
    dtype = _dtype(name)
    data = bytearray(b64decode(text))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def _array(held: Any) -> Any:
    name, shape, text = held
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise TypeError(f"{name} is no dtype of numbers")
    return np.frombuffer(b64decode(text), dtype).reshape(shape).copy()


def _class(name: Any, base: type) -> Any:
    """Return one of plait's own classes, a subclass of `base`. Raises TypeError or LookupError for others."""
    module, qualified = name
    if not _OWN.fullmatch(module):
        raise TypeError(f"{module} is not plait's own")
    found: Any = sys.modules[module]  # not imported for it: `plait.__main__` would run a command
    for part in qualified.split("."):
        found = vars(found)[part]
    if not (isinstance(found, type) and issubclass(found, base) and found.__module__ == module):
        raise TypeError(f"{qualified} is no class of {module}")
    return found


def _object(held: Any) -> Any:
    kind = _class(held[0], object)
    names = [one.name for one in fields(kind)]
    values = {name: _value(one) for name, one in held[1]}
    if sorted(values) != sorted(names):
        raise TypeError(f"{kind.__name__} has the fields {names}")
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _error(held: Any) -> PlaitError:
    kind = _class(held[0], PlaitError)
    made: PlaitError = Exception.__new__(kind, *_value(held[1]))
    vars(made).update(_value(held[2]))
    return made


def _text(data: bytes) -> str:
    return b64encode(data).decode()


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "dict": lambda held: {_value(key): _value(one) for key, one in held},
    "bytes": b64decode,
    "complex": lambda held: complex(*held),
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda held: _array(held)[()],
    "dtype": _dtype,
    "device": torch.device,
    "path": Path,
    "enum": lambda held: _class(held[0], Enum)[held[1]],
    "error": _error,
    "named": lambda held: _class(held[0], tuple)(*map(_value, held[1])),
    "object": _object,
}
"""By tag, the function of what it holds."""
