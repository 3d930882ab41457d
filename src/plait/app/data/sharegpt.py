"""Turns of conversations of ShareGPT, with `from` and `value`, as messages with `role` and `content`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait.errors import DataError

_CALLS = ("function_call", "function-call", "tool_call", "tool_calls")
"""Who says a turn that is calls of functions, as JSON."""
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", *_CALLS), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}
"""The role of each speaker, in the names of ShareGPT and of the data sets that follow it."""
_NAMES = {"from": "role", "value": "content"}


def is_turn(found: Any) -> bool:
    """Return whether a value is a message with `role`, or a ShareGPT turn with `from`."""
    return isinstance(found, Mapping) and bool({"role", "from"} & found.keys())


def as_message(turn: Mapping[str, Any], *, is_shared: bool) -> Mapping[str, Any]:
    """Return a turn as a message; a message without `from` is returned as it is.

    `is_shared`: whether it is of `conversations`, in which a role may have ShareGPT's names too. Raises
    DataError for an unknown speaker, for a field under both names, and for calls that are no JSON.
    """
    if "from" not in turn and not (is_shared and turn.get("role") in list(_ROLES)):
        return turn
    for name, same in _NAMES.items():
        if name in turn and same in turn:
            raise DataError(f"has a message with {name} and {same}, which are names of one field: remove one")
    message = {_NAMES.get(name, name): value for name, value in turn.items()}
    speaker = message["role"]
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise DataError(
            f"has a message from {json.dumps(speaker, default=str)[:40]}: give human, gpt, system, "
            "function_call or observation, or messages with role and content"
        )
    message["role"] = _ROLES[speaker]
    if speaker in _CALLS and "content" in message:
        message["tool_calls"] = _calls(message.pop("content"), speaker)
    return message


def _calls(value: Any, speaker: str) -> list[dict[str, Any]]:
    """Return the calls of functions in a turn, as messages have them in `tool_calls`."""
    found = _read(value)
    calls = [one.get("function", one) if isinstance(one, Mapping) else one for one in _listed(found)]
    if not calls or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in calls):
        raise DataError(
            f'has a message from {speaker} that is no JSON of calls: give {{"name": …, "arguments": …}}, or '
            "a list of these"
        )
    return [
        {"type": "function", "function": {**one, "arguments": _read(one.get("arguments", {}))}}
        for one in calls
    ]


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _read(value: Any) -> Any:
    """Return the value that a text has in JSON; what is no JSON as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
