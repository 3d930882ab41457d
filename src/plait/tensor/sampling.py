"""Continuing a sequence: what the model is shown, and how the next token is drawn from its logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import DataError

LENGTH_STEP = 64
"""Sequences are padded to multiples of it, so that few shapes occur while one grows token by token."""


def padded(sequence: Tensor, context: int | None) -> tuple[Tensor, int]:
    """The last `context` tokens of `sequence` `[rows, length]`, padded on the right, and how many are real.

    A causal model does not look at the padding. Without a context nothing is cut or padded.
    """
    if context is None:
        return sequence, sequence.shape[1]
    seen = sequence[:, -context:]
    length = seen.shape[1]
    wanted = min(context, -(-length // LENGTH_STEP) * LENGTH_STEP)
    return functional.pad(seen, (0, wanted - length)), length


def require_prompt(prompt: Tensor, tokens: int, temperature: float, top_k: int | None) -> None:
    """DataError for what cannot be continued."""
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise DataError(f"the prompt has shape {list(prompt.shape)}: give [rows, length], length at least 1.")
    if tokens < 0:
        raise DataError(f"{tokens} tokens were asked for: give at least 0.")
    if temperature < 0:
        raise DataError(f"the temperature is {temperature}: give at least 0 (the likeliest token).")
    if top_k is not None and top_k < 1:
        raise DataError(f"top_k is {top_k}: give at least 1, or None for all tokens.")


def next_token(
    logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One token per row of `logits` `[rows, vocab]`, int64 `[rows]`.

    `temperature` 0 takes the likeliest. The draw is made on the CPU, where `generator` lives, so equal
    logits give equal tokens on every device.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.detach().to("cpu", torch.float64) / temperature
    if top_k is not None and top_k < scaled.shape[-1]:
        smallest = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    drawn = torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator).squeeze(-1)
    return drawn.to(logits.device)
