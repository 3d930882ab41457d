"""Conversations, a tokenizer of characters with a chat template, and what of them is learnt, by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from torch import nn

from parity import huggingface_cases as cases
from plait.app.data.preparation import prepare_corpus

LETTERS = "abcdefghi "
WORDS = ["<unk>", "<end>", "[user]", "[assistant]", *LETTERS]
PLAIN = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
CONTEXT = 32
Chat = list[dict[str, str]]


def save_tokenizer(folder: Path, template: str | None = PLAIN) -> None:
    """Write a tokenizer of single characters, with a token for the end, and its chat template."""
    import tokenizers

    numbers = {word: number for number, word in enumerate(WORDS)}
    reader = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], unk_token="<unk>"))
    reader.add_special_tokens(["<end>", "[user]", "[assistant]"])
    reader.save(str(folder / "tokenizer.json"))
    configured = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    if template is not None:
        configured["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(configured))


def save_llama(folder: Path) -> None:
    """Write a tiny Llama of transformers, every value drawn, and the tokenizer beside it."""
    model: nn.Module = cases.drawn(
        lambda: cases.llama(vocab_size=len(WORDS), max_position_embeddings=CONTEXT)
    )
    model.float().save_pretrained(folder)
    save_tokenizer(folder)


def conversations(count: int, seed: int = 5) -> list[Chat]:
    """Conversations of 1 or 2 questions and answers; the first is longer than a row."""
    draw = random.Random(seed)
    lengths = [[25, 9], *([draw.randint(1, 3) for _ in range(2 * draw.randint(1, 2))] for _ in range(count))]
    return [
        [
            {
                "role": ("user", "assistant")[number % 2],
                "content": "".join(draw.choice(LETTERS) for _ in range(length)),
            }
            for number, length in enumerate(each)
        ]
        for each in lengths[:count]
    ]


def by_hand(chat: Chat) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation as the template writes it, and which of them are to be predicted."""
    tokens, answers = list[int](), list[bool]()
    for message in chat:
        said = [*message["content"], "<end>"]
        tokens += [WORDS.index(word) for word in (f"[{message['role']}]", *said)]
        answers += [False, *[message["role"] == "assistant"] * len(said)]
    return tokens, answers


def save_chats(path: Path, chats: list[Chat]) -> Path:
    """Write conversations as JSON lines."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def prepare(source: Path, folder: Path, tokenizer: Path) -> Path:
    """What `plait data prepare` writes; each line of a text is a document."""
    prepare_corpus([str(source)], folder, str(tokenizer), lines=source.suffix == ".txt")
    return folder


def lines(count: int, seed: int = 6) -> str:
    """Documents of text, one a line, some longer than a row."""
    draw = random.Random(seed)
    sizes = [draw.choice((2, 5, 9, 2 * CONTEXT)) for _ in range(count)]
    return "".join("".join(draw.choice(LETTERS[:-1]) for _ in range(size)) + "\n" for size in sizes)


def sections(
    model: Path, source: Path, run: Path, parallel: dict[str, Any], **training: Any
) -> dict[str, dict[str, Any]]:
    """The sections of a configuration of `plait train`, as JSON has them."""
    settings = {"batch": 4, "microbatches": 2, "warmup": 3, "lr": 1e-2, "validate_batches": 1}
    return {
        "model": {"name": str(model)},
        "data": {"source": str(source), "validation": 0.0},
        "train": settings | training,
        "parallel": parallel,
        "run": {"dir": str(run), "tensorboard": False, "save_every": None},
    }
