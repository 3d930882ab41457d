"""Conversations as records: their messages, which of them are learnt, and arguments of the chat template.

A record has `messages`, each with `role` and `content`, or `conversations`, as ShareGPT has them, of which
those of the assistant are to be learnt; or a `prompt` and a `completion`, as text or as messages, of which
the completion is; or a `text`, all of which is. Records of one file may differ in this.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def as_message(turn: Mapping[str, Any], *, is_shared: bool) -> Mapping[str, Any]:
    """Return a turn in ShareGPT's form (`from`, `value`) as a message (`role`, `content`), others unchanged.

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
            f"has a message from {short_json(speaker)}: give human, gpt, system, function_call or "
            "observation, or messages with role and content"
        )
    message["role"] = _ROLES[speaker]
    if speaker in _CALLS and "content" in message:
        message["tool_calls"] = _calls(message.pop("content"), speaker)
    return message


def _calls(value: Any, speaker: str) -> list[dict[str, Any]]:
    """Return the calls of functions in a turn, as messages have them in `tool_calls`."""
    found = _read(value)
    listed = found if isinstance(found, list) else [found]
    calls = [one.get("function", one) if isinstance(one, Mapping) else one for one in listed]
    if not calls or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in calls):
        raise DataError(
            f'has a message from {speaker} that is no JSON of calls: give {{"name": …, "arguments": …}}, or '
            "a list of these"
        )
    return [
        {"type": "function", "function": {**one, "arguments": _read(one.get("arguments", {}))}}
        for one in calls
    ]


def _read(value: Any) -> Any:
    """Return the value of a JSON text; a text that is not JSON unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


Message = Mapping[str, Any]
ANSWERS = "assistant"
_OTHER_ROLES = frozenset({"user", "system", "developer", "tool", "function", "ipython"})
_TEXT_PARTS = ("text", "input_text", "output_text")
_LEARNT = ("weight", "train", "training", "loss")
"""Fields of a message that say whether it is learnt: of OpenAI, and of other trainers."""
_TURNS = ("messages", "conversations")
"""Fields that are a conversation; the first that is there is read."""
_VARIABLES = "chat_template_kwargs"
_CONTENT = (
    *("tools", "functions", "documents", "system", "system_prompt", "enable_thinking", "chat_template"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
"""Fields beside messages that are part of a conversation: refused where the template does not read them."""
_SET_BY_PLAIT = frozenset({"messages", "add_generation_prompt", "continue_final_message", "chat_template"})


@dataclass(frozen=True)
class ChatRecord:
    """A conversation read from one row: its messages, learnt flags and template arguments."""

    messages: Sequence[Message]
    learnt: Sequence[bool]
    """Whether each message is learnt."""
    first: int = 0
    """The messages before this one are a prompt."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside messages."""
    unread: tuple[str, ...] = ()
    """The names of other fields of the row."""


def holds_chats(fields: Collection[str]) -> bool:
    """Return whether records with these fields are conversations."""
    return not {*_TURNS}.isdisjoint(fields) or {"prompt", "completion"} <= set(fields)


def text_record(record: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return prompt, completion and names of other fields of a record of two texts; None for other records.

    Of a record with a `text` in their place the prompt is "" and the completion the text. Raises
    DataError for fields that belong to a conversation, since no chat template reads them.
    """
    if any(record.get(name) is not None for name in _TURNS):
        return None
    prompt, completion = record.get("prompt"), record.get("completion")
    what, read = "a prompt and a completion that are text", {"prompt", "completion"}
    if completion is None and record.get("text") is not None:
        prompt, completion, what, read = "", record["text"], "a text", {"text"}
    if not isinstance(prompt, str) or not isinstance(completion, str):
        return None
    others = {name: value for name, value in _others(record, read).items() if value is not None}
    _refuse_preferences(record)
    for name, value in others.items():
        if name in (*_CONTENT, _VARIABLES) and value not in ("", [], {}):
            raise DataError(
                f"has {name} beside {what}, which no chat template reads: give messages, or remove it"
            )
    return prompt, completion, tuple(others)


def chat_record(record: Mapping[str, Any], read: Collection[str]) -> ChatRecord:
    """Return a record as a conversation; `read`: the variables that the chat template reads.

    Raises DataError for a record that is none, by what is missing, and for what it has and cannot be done.
    """
    name = next((name for name in _TURNS if record.get(name) is not None), None)
    if name is not None:
        before, rest = list[Message](), _messages(record[name], name)
        others = _others(record, (name,))
        if name != "messages":
            rest, others = _with_system(rest, others)
    elif record.get("prompt") is not None and record.get("completion") is not None:
        before, rest = (_messages(record[name], name) for name in ("prompt", "completion"))
        others = _others(record, ("prompt", "completion"))
        _refuse_preferences(record)
    else:
        filled = ", ".join(name for name, value in record.items() if value is not None)
        raise DataError(
            "has neither messages, conversations, prompt and completion, nor text (it has: "
            f"{filled or 'nothing'})"
        )
    if not rest:
        raise DataError("has no messages")
    messages = [*before, *rest]
    variables, unread = _variables(others, read)
    learnt = [_is_learnt(one, place >= len(before)) for place, one in enumerate(messages)]
    shown = [{name: value for name, value in one.items() if name not in _LEARNT} for one in messages]
    return ChatRecord(shown, learnt, len(before), variables, unread)


def short_json(value: Any) -> str:
    """Return the first 40 characters of a value as JSON, for errors; of other objects of their `str`."""
    return json.dumps(value, default=str)[:40]


def unknown_roles(chat: ChatRecord) -> tuple[str, ...]:
    """Return the roles in a conversation that are neither the assistant's nor another common one."""
    roles = dict.fromkeys(str(message["role"]) for message in chat.messages)
    return tuple(role for role in roles if role not in {ANSWERS, *_OTHER_ROLES})


def message_fields(chat: ChatRecord) -> Iterator[str]:
    """Yield the names of non-empty fields of messages other than role and content."""
    yield from dict.fromkeys(
        name
        for message in chat.messages
        for name, value in message.items()
        if name not in ("role", "content") and value not in ("", [], {})
    )


def joined_parts(message: Message) -> Message:
    """Return a message whose content, if given as a list of parts, is replaced by the text of all parts."""
    parts = message.get("content")
    return message if not isinstance(parts, list) else {**message, "content": "".join(part_texts(parts))}


def part_texts(parts: Sequence[Any]) -> list[str]:
    """Return the texts of a message's parts."""
    return [part if isinstance(part, str) else part["text"] for part in parts]


def _others(record: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in known}


def _messages(found: Any, name: str) -> list[Message]:
    """Return a field of a record as messages; DataError where it is none."""
    if isinstance(found, Mapping) and all(isinstance(one, list) for one in found.values()):
        # In some tables a conversation is a list for each field.
        found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    is_list = isinstance(found, list) and all(
        isinstance(one, Mapping) and {"role", "from"} & one.keys() for one in found
    )
    if not is_list and name in _TURNS:
        fields = "role and content" if name == "messages" else "from and value, or role and content"
        raise DataError(f"has {name} that are no list of messages with {fields}")
    if not is_list:
        raise DataError(
            f"has prompt and completion that are not both text, and a {name} that is no list of messages"
        )
    return [_message(one, is_shared=name == "conversations") for one in found]


def _with_system(messages: list[Message], others: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages of ShareGPT with the field `system` as their first, and the other fields."""
    system = others.pop("system", None)
    if system in (None, ""):
        return messages, others
    if not isinstance(system, str):
        raise DataError(f"has a system that is {short_json(system)}: give text")
    if messages and messages[0]["role"] == "system":
        raise DataError("has a field system and a message of the system: remove one of them")
    return [{"role": "system", "content": system}, *messages], others


def _message(found: Message, *, is_shared: bool) -> Message:
    """Return a message without null fields, as transformers does. DataError for content that is no text."""
    filled = {name: value for name, value in found.items() if value is not None}
    message = as_message(filled, is_shared=is_shared)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f'has a message whose role is {short_json(role)}: give text, such as "user"')
    if isinstance(content, list):
        return {**message, "content": [_part(one) for one in content]}
    if content is None and not message.keys() - {"role", "name", *_LEARNT}:
        raise DataError(f"has a message of the role {role!r} without content: remove it, or give the content")
    if content is not None and not isinstance(content, str):
        raise DataError(
            f"has a message of the role {role!r} whose content is {short_json(content)}: give text, "
            "or a list of parts"
        )
    return message


def _part(part: Any) -> Any:
    """Return a part of a message's content, without null fields. Raises DataError for one that is no text."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else short_json(part)
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {name: value for name, value in part.items() if value is not None}
    raise DataError(
        f"has content with a part of the type {kind!r}, and plait learns text alone: leave such "
        "conversations out"
    )


def _is_learnt(message: Message, in_completion: bool) -> bool:
    """Return whether a message is learnt: of the assistant, and not excepted by a weight of 0 or false."""
    answers = in_completion and message["role"] == ANSWERS
    for name in _LEARNT:
        value = message.get(name, answers)
        if value not in (0, 1):
            raise DataError(
                f"has a message with {name} = {short_json(value)}, and a message is learnt (1, true) or "
                "not (0, false): give one of these"
            )
        if value and not answers and in_completion:
            raise DataError(
                f"has a message of the role {message['role']!r} with {name} = {short_json(value)}, and only "
                f"answers of the role {ANSWERS!r} are learnt: leave it out"
            )
        answers = answers and bool(value)
    for name in message:
        if name.endswith("_detail") and name.removesuffix("_detail") in _LEARNT:
            raise DataError(f"has a message with {name}, and messages are learnt whole: leave it out")
    return answers


def _variables(others: Mapping[str, Any], read: Collection[str]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the template arguments in a row, and the names of fields that are never read."""
    given = others.get(_VARIABLES) or {}
    if not isinstance(given, Mapping):
        raise DataError(f"has {_VARIABLES} that are no object of names and values")
    found: dict[str, Any] = {}
    unread = []
    for name, written in [*_others(others, (_VARIABLES,)).items(), *given.items()]:
        value = _decoded(name, written)
        if value is None:
            continue
        if name in read and name not in _SET_BY_PLAIT:
            found[name] = value
        elif value in ("", [], {}):
            continue
        elif name in (*_CONTENT, *_SET_BY_PLAIT, *given):
            raise DataError(
                f"has {name}, which the chat template of its tokenizer does not read: give a template that "
                "does, or remove it"
            )
        else:
            unread.append(name)
    return found, tuple(unread)


def _decoded(name: str, value: Any) -> Any:
    """Return the value of a field; tools may be written as JSON, as tables need it, and "" is none."""
    if name != "tools" or not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError:
        raise DataError("has tools that are text, and no JSON") from None


def _refuse_preferences(record: Mapping[str, Any]) -> None:
    """Raise DataError for rows whose completions are not all to be learnt."""
    if isinstance(record.get("label"), bool):
        raise DataError(
            "has a label that says whether its completion is a good one, and all completions are learnt: "
            "keep the good ones, and remove the field"
        )
