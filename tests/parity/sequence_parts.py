"""Models whose layers run on parts of the sequence, each in another way; see `test_sequence_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from parity import data
from parity.case import Batch, Case
from parity.cases import GPT2_VOCAB, with_values
from plait.rules import Rules, column, entrance, row, sequence, vocabulary

HIDDEN, HEADS = 24, 12
"""Both divide by 2, 3 and 4."""


@cache
def of_length(case: Case, length: int) -> Case:
    """The case on sequences of tokens of another length."""

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(GPT2_VOCAB, (rows, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    return replace(case, draw=draw)


class MLP(nn.Module):
    """A region with an entrance and biases, in a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, value: Tensor) -> Tensor:
        inner: Tensor = self.down(torch.tanh(self.up(self.norm(value))))
        return value + inner


class Mixer(nn.Module):
    """Sees the whole sequence: the mean of the positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, value: Tensor) -> Tensor:
        count = torch.arange(1, value.shape[1] + 1, device=value.device).unsqueeze(-1)
        mixed: Tensor = self.linear(value.cumsum(1) / count)
        return value + mixed


class Start(nn.Module):
    """Tokens to what flows, and which positions each may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(GPT2_VOCAB, HIDDEN)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        near = (places.unsqueeze(-1) - places) % 3 < 2
        return self.token(tokens), near & (tokens.unsqueeze(1) % 5 > 0) | (places.unsqueeze(-1) == places)


class Masked(nn.Module):
    """Attention with a mask `[rows, length, length]`, which it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.output = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value, mask = values
        entered = self.norm(value)
        query, key, mixed = (
            linear(entered).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, mixed, mask.unsqueeze(1))
        return value + self.output(mixed.transpose(1, 2).flatten(2)), mask


class First(nn.Module):
    """Only what flows, without the mask."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0]


class Turned(nn.Module):
    """Tokens `[rows, length]` to `[length, rows, hidden]`."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(GPT2_VOCAB, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.token(tokens.T)
        return result


class Head(nn.Module):
    """Logits `[rows, length, vocabulary]`, of what has its rows in another dim."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.norm, self.output = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, GPT2_VOCAB)

    def forward(self, value: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(value))
        return logits.movedim(self.rows, 0)


REGIONS: Rules = {"*.up": column, "*.down": row}
ENTERED: Rules = {**REGIONS, "*.norm": entrance}
HEAD: Rules = {"head": sequence, "head.output": vocabulary}


def _sequence(rules: Rules, **layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    model.rules = rules  # type: ignore[assignment]
    return model


def floats_to_shards() -> nn.Module:
    """Numbers come in, cut at once; the last layer, a norm, ends in parts. Each column enters by itself."""
    rules = {**REGIONS, "a": sequence, "b": sequence, "norm": sequence}
    return _sequence(rules, a=MLP(), b=MLP(), norm=nn.LayerNorm(HIDDEN))


def mixed() -> nn.Module:
    """Layers that see the whole sequence between those that do not, once two of them."""
    rules = {**ENTERED, **HEAD, **dict.fromkeys(("a", "b", "c"), sequence)}
    return _sequence(
        rules,
        token=nn.Embedding(GPT2_VOCAB, HIDDEN),
        a=MLP(),
        one=Mixer(),
        b=MLP(),
        two=Mixer(),
        three=Mixer(),
        c=MLP(),
        head=Head(),
    )


def with_a_mask() -> nn.Module:
    """Layers hand on what flows, in parts, and a mask, which is whole."""
    rules: Rules = {
        **{f"*.{name}": column.by("heads") for name in ("query", "key", "value")},
        **{f"{name}.output": row.by("heads") for name in ("a", "b")},
        "*.norm": entrance,
        **dict.fromkeys(("a", "b", "first"), sequence),
        **HEAD,
    }
    return _sequence(rules, start=Start(), a=Masked(), b=Masked(), first=First(), head=Head())


def length_first() -> nn.Module:
    """`[length, rows, hidden]` flows."""
    rules = {**ENTERED, **HEAD, **dict.fromkeys(("a", "b", "head"), sequence.along(0))}
    return _sequence(rules, turned=Turned(), a=MLP(), b=MLP(), head=Head(rows=1))


def draw_numbers(length: int) -> Callable[[int, torch.Generator], Batch]:
    """Sequences of vectors, and what they are to become."""

    def draw(rows: int, generator: torch.Generator) -> Batch:
        shape = rows, length, HIDDEN
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    return draw


@cache
def numbers(length: int) -> Case:
    """`floats_to_shards` with its data."""
    draw = draw_numbers(length)
    return Case("floats", with_values(floats_to_shards), draw, loss=data.Squares(), mean=functional.mse_loss)


@cache
def tokens(build: Callable[[], nn.Module], length: int) -> Case:
    """One of the other models with its data."""
    return of_length(Case(build.__name__, with_values(build), data.draw_tokens), length)
