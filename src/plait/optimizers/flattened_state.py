"""Flattens optimizer state with lists of tensors (such as preconditioners) to one key per tensor.

nested    {"GG": [tensor, []], "step": 3}
flat      {"GG": ["GG:0", []], "GG:0": tensor, "step": 3}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with a key of its own for each tensor that is in a list."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, list | tuple):
            flat |= dict(_tensors_in(value, key))
            flat[key] = _with_keys(value, key)
        else:
            flat[key] = value
    return flat


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flat_state`: return the state with tensors back in their lists; tuples become lists."""
    listed = {key: value for key, value in flat.items() if isinstance(value, list)}
    inside = {one for key, value in listed.items() for one in _keys_in(value)}
    whole = {key: value for key, value in flat.items() if key not in inside}
    return whole | {key: _with_tensors(value, flat) for key, value in listed.items()}


def _tensors_in(value: Any, key: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors_in(one, f"{key}:{number}")


def _with_keys(value: Any, key: str) -> Any:
    """Return `value` with keys in place of the tensors in its lists."""
    if isinstance(value, list | tuple):
        return [_with_keys(one, f"{key}:{number}") for number, one in enumerate(value)]
    return key if isinstance(value, Tensor) else value


def _keys_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _keys_in(one)
    elif isinstance(value, str):
        yield value


def _with_tensors(value: Any, flat: Mapping[str, Any]) -> Any:
    """Return `value` with tensors in place of their keys."""
    if isinstance(value, list):
        return [_with_tensors(one, flat) for one in value]
    return flat[value] if isinstance(value, str) and value in flat else value
