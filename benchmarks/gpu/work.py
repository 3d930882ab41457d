"""The work, alike for all contestants: the model, its first values, the data, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import plait

RATE, DECAY, LIMIT = 1e-4, 0.1, 1.0
"""AdamW's, and what gradients are clipped to."""
STD = 0.02
"""Of the first values of matrices."""


@dataclass(frozen=True)
class Work:
    """A GPT-2 in bf16, and what each GPU adds to the batch of a step."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    context: int
    rows: int
    """Sequences of a micro-batch."""
    microbatches: int
    """For each GPU: a plan with fewer data-parallel ranks has more of them."""

    @property
    def tokens(self) -> int:
        """Of each GPU in a step."""
        return self.microbatches * self.rows * self.context


WORKS = {
    "1.3B": Work(24, 2048, 16, vocab=32768, context=2048, rows=2, microbatches=4),
    "0.37B": Work(24, 1024, 16, vocab=32768, context=2048, rows=2, microbatches=4),
    "0.14B": Work(12, 768, 12, vocab=32768, context=1024, rows=2, microbatches=4),
    "tiny": Work(4, 64, 4, vocab=256, context=32, rows=2, microbatches=4),
}
LEAST_MEMORY = {"1.3B": 75e9, "0.37B": 22e9, "0.14B": 0.0}
"""Bytes of a GPU on which two contestants of a size live at the same time."""


def fitting(memory: float) -> str:
    """Return the name of the largest work for GPUs of `memory` bytes."""
    return next(name for name, least in LEAST_MEMORY.items() if memory >= least)


def build(work: Work) -> nn.Sequential:
    """Return the model on the meta device."""
    return plait.models.gpt2(
        layers=work.layers,
        hidden=work.hidden,
        heads=work.heads,
        vocab=work.vocab,
        context=work.context,
        tied=False,
    )


def with_values(work: Work, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    """Return the model on a device, with random values that are equal on all ranks."""
    model = build(work).to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, STD, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith(".weight") else 0.0)
    return model


def shares(work: Work, ranks: int, index: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of step after step: part `index` of `count` of the batch of `ranks` GPUs.

    Low tokens are more frequent, so that there is something to learn.
    """
    generator = torch.Generator().manual_seed(0)
    while True:
        shape = ranks * work.microbatches * work.rows, work.context + 1
        drawn = torch.rand(shape, generator=generator).square() * work.vocab
        tokens = drawn.long().chunk(count)[index]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def optimizer_of(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer, the same for all contestants."""
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)


@dataclass(frozen=True)
class Trainee:
    """The training step of a contestant on one rank."""

    index: int
    """The number of its share of the batch, from 0."""
    count: int
    """The number of shares."""
    forward_backward: Callable[[Tensor, Tensor], Tensor]
    """Takes inputs and targets of the share; returns the mean loss of the whole batch, 0-d, on the device."""
    update: Callable[[], object]
    """Clips the gradients, and takes a step of the optimizer."""
    optimizer: torch.optim.Optimizer

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take a whole step, and return its loss."""
        loss = self.forward_backward(inputs, targets)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> Iterator[Tensor]:
        """Yield the parameters, their gradients, and the tensors of the optimizer's state."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
                kept = self.optimizer.state.get(parameter, {})
                yield from (value for value in kept.values() if isinstance(value, Tensor))
