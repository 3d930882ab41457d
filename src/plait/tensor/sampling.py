"""Drawing the next token from logits."""

from __future__ import annotations

import torch
from torch import Tensor


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
