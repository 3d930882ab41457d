"""What rows of conversations say beside roles and texts: done, refused, or named as not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.app.data.chat_encoder import ChatEncoder, EncodedPart
from plait.errors import ConfigError, DataError

pytestmark = pytest.mark.transformers
START = "{{ '<|' + m['role'] + '|>' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
JOINS = "{% for m in messages %}" + START + "{{ m['content'] + '<end>' }}{% endfor %}" + ASKS
PRINTS = JOINS.replace("m['content'] +", "m['content'] ~")
MARKS = JOINS.replace(
    "{{ m['content'] + '<end>' }}",
    "{% if m['role'] == 'assistant' %}{%- generation -%}{{ m['content'] + '<end>' }}{%- endgeneration -%}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}",
)
READS = (
    "{{ bos_token }}{% if system is defined %}{{ system }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% if enable_thinking is false %}/no{% endif %}"
    "{% for m in messages %}" + START + "{{ m.reasoning_content or '' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text | trim }}"
    "{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end>"
    "{% endfor %}" + ASKS
)
KNOWS_TWO = JOINS.replace("in messages", "in messages if m['role'] in ('user', 'assistant')")
ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "yo"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}]

HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
SHARED = [
    {"from": "system", "value": "s"},
    HUMAN,
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "42"},
    GPT,
]
THINKS = JOINS.replace(
    "{{ m['content'] + '<end>' }}",
    "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'].split('</think>')[-1] }}<end>",
)
TURNS = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}"
) + JOINS
THOUGHT = {"role": "assistant", "content": "<think>so</think>yo"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A folder for a tokenizer of bytes, which begins each text with <bos>."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    made: Path = tmp_path_factory.mktemp("tokenizer")
    return made


def save(folder: Path, template: object, post: str = "<bos> $A") -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<bos>", "<end>", "<|user|>", "<|assistant|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(words[:4])
    made.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<bos>", 0)])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def shown(encoder: ChatEncoder, found: EncodedPart) -> tuple[str, str]:
    """The text of a conversation, and that of its answers."""
    decode = encoder._tokenizer.decode
    return decode(found.tokens.tolist()), decode(found.tokens[found.answers].tolist())


def chat(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"messages": list(messages), **others}


HONOURED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "tools": (READS, chat(ASK, SAY, tools=TOOLS), json.dumps(TOOLS) + "<|user|>hi", "yo<end>"),
    "tools as JSON": (READS, chat(ASK, SAY, tools=json.dumps(TOOLS)), json.dumps(TOOLS), "yo<end>"),
    "no tools": (JOINS, chat({**ASK, "tool_calls": []}, SAY, tools=[]), "<|user|>hi<end>", "yo<end>"),
    "documents": (READS, chat(ASK, SAY, documents=[{"text": "doc"}]), "doc<|user|>", "yo<end>"),
    "system": (READS, chat(ASK, SAY, system="be good"), "be good<|user|>", "yo<end>"),
    "thinking": (READS, chat(ASK, SAY, enable_thinking=False), "/no<|user|>", "yo<end>"),
    "kwargs": (READS, chat(ASK, SAY, chat_template_kwargs={"enable_thinking": False}), "/no", "yo<end>"),
    "calls": (
        READS,
        chat(ASK, CALLS, SAY),
        "<|assistant|>" + json.dumps(CALL["function"]) + "<end>",
        "}<end>yo",
    ),
    "reasoning": (READS, chat(ASK, {**SAY, "thinking": "so "}), "<|assistant|>so yo<end>", "so yo<end>"),
    "weight": (
        JOINS,
        chat(ASK, {**SAY, "weight": 0}, ASK, {**SAY, "weight": 1}),
        "yo<end><|user|>",
        "yo<end>",
    ),
    "train": (MARKS, chat(ASK, {**SAY, "train": False}, ASK, SAY), "yo<end><|user|>", "yo<end>"),
    "null weight": (JOINS, chat({**ASK, "train": False}, {**SAY, "weight": None}), "yo", "yo<end>"),
    "parts joined": (JOINS, chat({**ASK, "content": PARTS}, SAY), "<|user|>a b <end>", "yo<end>"),
    "parts not printed": (
        PRINTS,
        chat(ASK, {**SAY, "content": PARTS}),
        "<|assistant|>a b <end>",
        "a b <end>",
    ),
    "texts as parts": (PRINTS, chat({**ASK, "content": ["a", "b"]}, SAY), "<|user|>ab<end>", "yo<end>"),
    "parts read": (READS, chat({**ASK, "content": PARTS}, SAY), "<|user|>ab<end>", "yo<end>"),
    "marked completion": (
        MARKS,
        {"prompt": [ASK, SAY, ASK], "completion": [SAY]},
        "yo<end><|user|>",
        "yo<end>",
    ),
    "answer first": (JOINS, chat(SAY, ASK, SAY), "<|assistant|>yo<end><|user|>hi<end>", "yo<end>yo<end>"),
    "begins once": (READS, chat(ASK, SAY), "<bos><|user|>hi<end><|assistant|>yo<end>", "yo<end>"),
    "sharegpt": (
        READS,
        {"conversations": SHARED},
        f"<|system|>s<end><|user|>hi<end><|assistant|>{json.dumps(CALL['function'])}<end><|tool|>42<end>",
        json.dumps(CALL["function"]) + "<end>yo<end>",
    ),
    "sharegpt's system": (
        JOINS,
        {"conversations": [HUMAN, GPT], "system": "be", "tools": ""},
        "<|system|>be<end><|user|>hi",
        "yo<end>",
    ),
    "sharegpt's roles": (
        JOINS,
        {"conversations": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yo"}]},
        "<|user|>hi<end><|assistant|>yo<end>",
        "yo<end>",
    ),
    "turns in messages": (JOINS, chat(HUMAN, {**GPT, "weight": 0}, HUMAN, GPT), "<|user|>hi", "yo<end>"),
    "messages first": (JOINS, {**chat(ASK, SAY), "conversations": [HUMAN]}, "<|user|>hi", "yo<end>"),
    "text": (JOINS, {"text": "ab", "messages": None, "prompt": None}, "<bos>ab<end>", "ab<end>"),
    "thought": (THINKS, {"prompt": [ASK, THOUGHT, ASK], "completion": [SAY]}, "hi<end>", "yo<end>"),
    "texts": (JOINS, {"prompt": "a", "completion": "b"}, "<bos>ab<end>", "b<end>"),
    "texts that end": (JOINS, {"prompt": "<bos>a", "completion": "b<end>"}, "<bos>ab<end>", "b<end>"),
}


@pytest.mark.parametrize("template", {one[0]: None for one in HONOURED.values()})
def test_fields_of_a_chat_row_are_passed_to_its_template(folder: Path, template: str) -> None:
    save(folder, template)
    encoder = ChatEncoder(str(folder))
    for case, (of, record, part, answers) in HONOURED.items():
        if of != template:
            continue
        text, learnt = shown(encoder, encoder.encode(record))
        assert part in text, case
        assert answers in learnt if case == "calls" else answers == learnt, case
        is_text = isinstance(record.get("prompt"), str) or "text" in record
        assert text.count("<bos>") == (template == READS or is_text), case


@pytest.mark.parametrize(
    "case", ["tools", "documents", "thinking", "calls", "reasoning", "parts read", "train"]
)
def test_chat_tokens_are_those_of_transformers_apply_chat_template(folder: Path, case: str) -> None:
    template, record, _, _ = HONOURED[case]
    save(folder, template)
    encoder = ChatEncoder(str(folder))
    others = {name: value for name, value in record.items() if name != "messages"}
    found = encoder._tokenizer.apply_chat_template(
        record["messages"], return_dict=True, return_assistant_tokens_mask=template == MARKS, **others
    )
    assert encoder.encode(record).tokens.tolist() == found["input_ids"]
    if template == MARKS:
        learnt = encoder.encode(chat(*({**one, "train": None} for one in record["messages"])))
        assert learnt.answers.tolist() == [bool(one) for one in found["assistant_masks"]]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools": (JOINS, chat(ASK, SAY, tools=TOOLS), "has tools, which the chat template"),
    "no JSON": (READS, chat(ASK, SAY, tools="weather"), "has tools that are text, and no JSON"),
    "system": (JOINS, chat(ASK, SAY, system="be"), "has system, which the chat template"),
    "kwargs": (JOINS, chat(ASK, SAY, chat_template_kwargs={"mood": 1}), "has mood, which the chat template"),
    "ours": (
        READS,
        chat(ASK, SAY, chat_template_kwargs={"add_generation_prompt": True}),
        "add_generation_pro",
    ),
    "kwargs of none": (READS, chat(ASK, SAY, chat_template_kwargs=3), "that are no object of names"),
    "half": (
        JOINS,
        chat(ASK, {**SAY, "weight": 0.5}),
        r"weight = 0\.5, and a message is learnt .1, true. or",
    ),
    "word": (JOINS, chat(ASK, {**SAY, "train": "no"}), 'train = "no"'),
    "user": (JOINS, chat({**ASK, "train": True}, SAY), "role 'user' with train = true, and only answers"),
    "detail": (JOINS, chat(ASK, {**SAY, "train_detail": []}), "has a message with train_detail"),
    "calls": (
        JOINS,
        chat(ASK, {**CALLS, "content": ""}),
        "messages with tool_calls, which the chat template",
    ),
    "image": (
        READS,
        chat({**ASK, "content": [{"type": "image"}]}, SAY),
        "part of the type 'image', and plait",
    ),
    "images": (READS, chat(ASK, SAY, images=["a.png"]), "has images, which the chat template"),
    "null": (PRINTS, chat(ASK, {**SAY, "content": None}), "role 'assistant' without content"),
    "number": (PRINTS, chat(ASK, {**SAY, "content": 5}), "whose content is 5: give text"),
    "truth": (PRINTS, chat(ASK, {**SAY, "content": True}), "whose content is true: give text"),
    "role": (PRINTS, chat({**ASK, "role": None}, SAY), "has a message whose role is null"),
    "none": (JOINS, chat(), "has no messages"),
    "system of texts": (
        JOINS,
        {"prompt": "a", "completion": "b", "system": "c"},
        "has system beside a prompt",
    ),
    "bad one": (JOINS, {"prompt": "a", "completion": "b", "label": False}, "has a label that says whether"),
    "speaker": (JOINS, {"conversations": [{"from": "Eve", "value": "x"}]}, 'from "Eve": give human, gpt'),
    "no turns": (
        JOINS,
        {"conversations": ["hi"]},
        "has conversations that are no list of messages with from",
    ),
    "two names": (JOINS, chat({"role": "user", **HUMAN}, SAY), "with from and role, which are names of one"),
    "call of no JSON": (
        READS,
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "no JSON of cal",
    ),
    "unread call": (JOINS, {"conversations": SHARED}, "messages with tool_calls, which the chat template"),
    "two systems": (
        JOINS,
        {"conversations": SHARED, "system": "x"},
        "a field system and a message of the sys",
    ),
    "system of a number": (
        JOINS,
        {"conversations": [HUMAN], "system": 3},
        "has a system that is 3: give text",
    ),
    "empty turn": (JOINS, {"conversations": [{"from": "gpt"}]}, "role 'assistant' without content"),
    "tools of a text": (JOINS, {"text": "a", "tools": TOOLS}, "has tools beside a text, which no chat"),
    "thoughts": (
        THINKS,
        chat(ASK, THOUGHT, ASK, SAY),
        "changes what it wrote of the first 2 messages .'<thi",
    ),
    "answer first": (
        TURNS,
        chat(SAY, ASK, SAY),
        r"begins with the assistant, .* refuses .Roles must alternate.*"
        "put a message of the user before",
    ),
    "two questions": (
        TURNS,
        chat(ASK, ASK, SAY),
        "is refused by the chat template of .*: Roles must alternate",
    ),
    "two kinds": (JOINS, {"prompt": "a", "completion": [SAY]}, "not both text, and a prompt that is no list"),
}


@pytest.mark.parametrize("template", {template: None for template, _, _ in REFUSED.values()})
def test_fields_of_a_chat_row_that_its_template_cannot_honour_are_refused(
    folder: Path, template: str
) -> None:
    save(folder, template)
    encoder = ChatEncoder(str(folder))
    for of, record, message in REFUSED.values():
        if of == template:
            with pytest.raises(DataError, match=message):
                encoder.encode(record)


def test_fields_of_a_chat_row_that_nothing_reads_are_named(folder: Path) -> None:
    save(folder, JOINS)
    answer = {**SAY, "reasoning_content": "so", "name": "x"}
    found = ChatEncoder(str(folder)).encode(chat(ASK, answer, id=3, chosen="a", tools=None))
    assert found.unread == ("id", "chosen", "messages.reasoning_content", "messages.name")
    assert ChatEncoder(str(folder)).encode({"prompt": "a", "completion": "b", "label": 1}).unread == (
        "label",
    )


def test_messages_that_the_template_leaves_out_are_named(folder: Path) -> None:
    save(folder, KNOWS_TWO)
    found = ChatEncoder(str(folder)).encode(chat({"role": "bot", "content": "x!"}, ASK, SAY))
    assert (found.left_out_roles, found.unknown_roles) == (("bot",), ("bot",))
    assert ChatEncoder(str(folder)).encode(chat(ASK, SAY)).left_out_roles == ()


def test_one_of_several_templates_is_chosen_by_the_tools(folder: Path) -> None:
    named = [{"name": "default", "template": JOINS}, {"name": "tool_use", "template": READS}]
    save(folder, named)
    encoder = ChatEncoder(str(folder))
    assert "<bos>" in shown(encoder, encoder.encode(chat(ASK, SAY, tools=TOOLS)))[0]
    assert "<bos>" not in shown(encoder, encoder.encode(chat(ASK, SAY)))[0]
    save(folder, named[1:])
    with pytest.raises(ConfigError, match="has the chat templates tool_use, and none is named default"):
        ChatEncoder(str(folder)).encode(chat(ASK, SAY))
