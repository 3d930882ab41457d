"""The sample of a run: `train.sample` in tokens, and how the trained model continues it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.app.config.config import Config
from plait.app.data.chats import ChatEncoder
from plait.app.data.tokenizer import Tokenizer, printable

if TYPE_CHECKING:
    from plait.engine.engine import (  # with torch, without which a prompt is checked before the ranks start
        Engine,
    )

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and tokens that end a continuation."""

    tokens: list[int]
    stop: tuple[int, ...] = ()
    is_question: bool = False
    """Whether they are a user's message in the chat template, of which the text is not shown."""


def encode_prompt(config: Config, tokenizer: Tokenizer, *, is_question: bool) -> Prompt:
    """Return `train.sample` in tokens; a question is a user's message in the tokenizer's chat template.

    Raises `ConfigError` where the tokenizer has no chat template.
    """
    text = config.train.sample
    if not is_question or not text:
        return Prompt(tokenizer.prompt(text))
    encoder = ChatEncoder(config.tokenizer)
    return Prompt(encoder.question(text).tolist(), encoder.end_of_answer, True)


def sample_text(engine: Engine, config: Config, tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Return `train.sample` and its continuation, or the answer to it; the same on every rank that calls it.

    Communication: that of `Engine.generate`.
    """
    import torch  # late, as above

    settings = config.train
    start = torch.tensor([prompt.tokens], dtype=torch.int64, device=engine.mesh.device)
    tokens = engine.generate(
        start, settings.sample_tokens, temperature=TEMPERATURE, seed=settings.seed, stop=prompt.stop
    )[0].tolist()
    if prompt.is_question:
        return printable(f"{settings.sample}\n{tokenizer.decode(tokens[len(prompt.tokens) :])}")
    return printable(tokenizer.decode(tokens))
