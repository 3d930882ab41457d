"""What a row of a conversation becomes before any template sees it: messages, what is learnt, variables."""

from __future__ import annotations

from typing import Any

from plait.app.data.chat_records import (
    ChatRecord,
    as_message,
    chat_record,
    short_json,
    text_record,
    unknown_roles,
)

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "yo"}


def test_a_chat_row_gives_messages_learnt_answers_and_template_arguments() -> None:
    part = {"type": "text", "text": "a"}
    cases: list[tuple[dict[str, Any], tuple[str, ...], ChatRecord]] = [
        (
            {"messages": [ASK, SAY], "id": 3, "url": None, "note": ""},
            (),
            ChatRecord([ASK, SAY], [False, True], unread=("id",)),
        ),
        (
            {"messages": [{**ASK, "name": None}, {**SAY, "weight": 0}, {**SAY, "train": True, "loss": 1}]},
            (),
            ChatRecord([ASK, SAY, SAY], [False, False, True]),
        ),
        (
            {"messages": {"role": ["user", "assistant"], "content": ["hi", "yo"]}},
            (),
            ChatRecord([ASK, SAY], [False, True]),
        ),
        (
            {"messages": [{"role": "user", "content": [{**part, "cache": None}, "b"]}, SAY]},
            (),
            ChatRecord([{"role": "user", "content": [part, "b"]}, SAY], [False, True]),
        ),
        (
            {"prompt": [ASK, SAY, ASK], "completion": [SAY], "tools": "[1]", "mood": "x"},
            ("tools", "messages"),
            ChatRecord([ASK, SAY, ASK, SAY], [False, False, False, True], 3, {"tools": [1]}, ("mood",)),
        ),
        (
            {"messages": [SAY], "tools": " ", "chat_template_kwargs": {"deep": True}},
            ("tools", "deep"),
            ChatRecord([SAY], [True], variables={"deep": True}),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}, {"role": "bing", "content": "yo"}],
                "system": "s",
            },
            (),
            ChatRecord([{"role": "system", "content": "s"}, ASK, SAY], [False, False, True]),
        ),
        (
            {"messages": None, "conversations": [{**SAY, "weight": None}], "prompt": "a"},
            ("prompt",),
            ChatRecord([SAY], [True], variables={"prompt": "a"}),
        ),
    ]
    for record, read, expected in cases:
        assert chat_record(record, read) == expected
    roles = [{"role": one, "content": ""} for one in ("user", "bot", "assistant", "tool", "Eve", "bot")]
    assert unknown_roles(ChatRecord(roles, [False] * 6)) == ("bot", "Eve")
    assert short_json("x" * 50) == '"' + "x" * 39
    assert short_json({1, 2}) == '"{1, 2}"'


def test_a_row_of_two_texts_is_a_prompt_and_a_completion() -> None:
    assert text_record({"prompt": "a", "completion": "b", "id": 1, "none": None}) == ("a", "b", ("id",))
    assert text_record({"text": "a", "prompt": "b", "tools": []}) == ("", "a", ("prompt", "tools"))
    assert text_record({"text": "a", "prompt": "b", "completion": "c"}) == ("b", "c", ("text",))
    for record in (
        {"messages": [], "text": "a"},
        {"prompt": [], "completion": "b"},
        {"text": 3},
        {"completion": "b"},
    ):
        assert text_record(record) is None


def test_turns_of_sharegpt_become_messages() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    for turn, message in (
        ({"from": "gpt", "value": "yo", "weight": 1}, {**SAY, "weight": 1}),
        ({"from": "observation", "content": "42"}, {"role": "tool", "content": "42"}),
        ({"role": "human", "content": "hi"}, ASK),
        ({"role": "narrator", "content": "x"}, {"role": "narrator", "content": "x"}),
        (
            {
                "from": "tool_call",
                "value": '[{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}, {"name": "g"}]',
            },
            {
                "role": "assistant",
                "tool_calls": [
                    {"type": "function", "function": call},
                    {"type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
        ),
        (
            {"from": "function_call", "value": {"name": "f", "arguments": "no JSON"}},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {**call, "arguments": "no JSON"}}],
            },
        ),
    ):
        assert as_message(turn, is_shared=True) == message
    assert as_message({"role": "human", "content": "hi"}, is_shared=False) == {
        "role": "human",
        "content": "hi",
    }
