"""The work, alike for all contestants: the model, its first values, the data, and what a plan has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import plait
from plait.models.initial_values import initial_value
from plait.models.layers.layer_sequence import sequence_of

RANKS, MICROBATCHES = 2, 4
VOCAB, CONTEXT = 8192, 256
TOKENS = RANKS * MICROBATCHES * CONTEXT
"""Of a step, over all ranks."""
RATE, DECAY, LIMIT = 1e-4, 0.1, 1.0
"""AdamW's, and what gradients are clipped to."""

Step = Callable[[Tensor, Tensor], Tensor]
"""Trains on a rank's inputs and targets; gives the mean loss over all ranks, 0-d."""


def build() -> nn.Sequential:
    """GPT-2 on the meta device."""
    return plait.models.gpt2(layers=8, hidden=512, heads=8, vocab=VOCAB, context=CONTEXT, tied=False)


def values() -> Iterator[tuple[str, Tensor]]:
    """The first value of each parameter, one after the other; `parallelize` gives the same."""
    sequence = sequence_of(build())
    for name, users in sequence.users.items():
        layer = sequence.layers[users[0]]
        yield name, initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), seed=0)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank, one sequence a micro-batch: `[MICROBATCHES, CONTEXT]` each."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def payload(strategy: str, reduce: str) -> dict[str, float]:
    """Bytes that a rank hands in a step, by the formula, without padding.

    With `full` parameters are gathered for a layer's forward and again for its backward; but those of the
    last layer stay between the two, and those of the first one from a backward to the next forward.
    """
    layers = [sum(p.numel() for p in layer.module.parameters()) for layer in sequence_of(build()).layers]
    whole = 4 * sum(layers)
    if strategy == "none":
        return {"all_reduce": whole}
    gathered = whole / RANKS
    if strategy == "full":
        spared = MICROBATCHES * layers[-1] + (MICROBATCHES - 1) * layers[0]
        gathered *= 2 * MICROBATCHES
        gathered -= 4 * spared / RANKS
    times = MICROBATCHES if reduce == "each" and strategy != "optimizer" else 1
    return {"all_gather": gathered, "reduce_scatter": times * whole}
