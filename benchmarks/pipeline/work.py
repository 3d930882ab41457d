"""The work, alike for all contestants: the model, its first values, the cuts, the data and a step's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from plait.models.initial_values import initial_value
from plait.models.layers.layer_sequence import layer_costs, sequence_of
from plait.schedules.search.stage_cuts import LayerCosts, schedule_and_cut
from plait.tensor.named_layer import NamedLayer

BLOCKS, HIDDEN, HEADS, VOCAB, CONTEXT = 8, 512, 8, 8192, 256
MICROBATCHES = 8
TOKENS = MICROBATCHES * CONTEXT
"""Of a step."""
RATE, DECAY, LIMIT = 1e-4, 0.1, 1.0
"""AdamW's, and what gradients are clipped to."""

Step = Callable[[Tensor, Tensor], Tensor | None]
"""Trains on a batch of inputs and targets; gives its mean loss, on a rank that knows it."""


def build() -> nn.Sequential:
    """GPT-2 on the meta device: embedding, attention and MLP of each block, head."""
    return plait.models.gpt2(
        layers=BLOCKS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, context=CONTEXT, tied=False
    )


def cut(policy: str, ranks: int) -> tuple[int, ...]:
    """How many layers each stage of plait's `policy` takes by their count of multiplications."""
    costs = layer_costs(sequence_of(build()).layers)
    return schedule_and_cut(policy, LayerCosts.evenly(costs), ranks=ranks, microbatches=MICROBATCHES)[1]


def stage_of(number: int, counts: Sequence[int]) -> nn.Sequential:
    """The layers of one stage in plain PyTorch, with the values that `parallelize` gives them."""
    start, stop = list(pairwise(accumulate(counts, initial=0)))[number]
    return filled(sequence_of(build()).layers[start:stop])


def filled(layers: Iterable[NamedLayer]) -> nn.Sequential:
    """The layers with their first values."""
    modules = []
    for layer in layers:
        names = [name for name, _ in layer.module.named_parameters()]
        values = {name: initial_value(layer.module, layer.path, name, seed=0) for name in names}
        module = layer.module.to_empty(device="cpu")
        module.load_state_dict(values)
        modules.append(module)
    return nn.Sequential(*modules)


def batch(step: int, sequences: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
    """Inputs and targets, one sequence a micro-batch: `[sequences, CONTEXT]` each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (sequences, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """What a micro-batch of one sequence adds to the mean loss of a batch of `MICROBATCHES`."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICROBATCHES


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)
