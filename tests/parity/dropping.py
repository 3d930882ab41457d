"""A model that drops everywhere: outside of regions, inside them by heads and by features, and row by row.

On the single device each dropout applies its part of the whole mask, made for the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import woven
from parity.case import SEED, Case, Recipe
from parity.cases import GPT2_VOCAB, draw_contexts, with_values
from parity.outcome import Outcome
from parity.reference import materialise, train_model
from plait.plan.plan import Plan
from plait.rules import Rules, column, entrance, piece, row, sequence
from plait.tensor.dropout import key_of
from plait.tensor.dropout_mask import keep_mask

HEADS = 4


class Attention(nn.Module):
    """Drops attention probabilities `[rows, heads, length, length]`, and what comes out."""

    def __init__(self, p: float, hidden: int) -> None:
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.drop, self.after = nn.Dropout(p), nn.Dropout(p)

    def forward(self, value: Tensor) -> Tensor:
        entered = self.norm(value)
        query, key, mixed = (
            linear(entered).unflatten(-1, (-1, value.shape[-1] // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        probabilities = self.drop(functional.softmax(query @ key.transpose(-1, -2), -1))
        result: Tensor = self.output((probabilities @ mixed).transpose(1, 2).flatten(2))
        return value + self.after(result)


class ContextAttention(Attention):
    """The same by `plait.attention`, which under context parallelism computes it in blocks."""

    def forward(self, value: Tensor) -> Tensor:
        entered = self.norm(value)
        query, key, mixed = (
            linear(entered).unflatten(-1, (-1, value.shape[-1] // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = plait.attention(query, key, mixed, causal=False, scale=1.0, dropout=self.drop)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return value + self.after(result)


class MLP(nn.Module):
    """Drops features, and twice with one module what comes out."""

    def __init__(self, p: float, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop, self.after = nn.Dropout(p), nn.Dropout(p, inplace=True)

    def forward(self, value: Tensor) -> Tensor:
        inner = self.drop(torch.tanh(self.up(self.norm(value))))
        result: Tensor = value + self.after(self.after(self.down(inner)))
        return result


class Head(nn.Module):
    """Works on `[rows · length, features]`."""

    def __init__(self, p: float, hidden: int, vocab: int) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(p), nn.Linear(hidden, vocab)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.linear(self.drop(value.flatten(0, 1)))
        return result.unflatten(0, value.shape[:2])


class ContextHead(Head):
    """Works on `[rows, length, features]`."""

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.linear(self.drop(value))
        return result


RULES: Rules = {
    **dict.fromkeys(("1", "2", "3"), sequence),
    "*.norm": entrance,
    **{f"*.{name}": column.by("heads") for name in ("query", "key", "value")},
    "*.output": row.by("heads"),
    "2.drop": piece.along(1),
    "*.up": column,
    "*.down": row,
    "3.drop": piece.along(-1),
}


def dropping(
    p: float = 0.3, hidden: int = 16, vocab: int = GPT2_VOCAB, *, contexts: bool = False
) -> nn.Sequential:
    """Five layers; the second is a dropout itself. `contexts`: for context parallelism."""
    model = nn.Sequential(
        nn.Embedding(vocab, hidden),
        nn.Dropout(p),
        (ContextAttention if contexts else Attention)(p, hidden),
        MLP(p, hidden),
        (ContextHead if contexts else Head)(p, hidden, vocab),
    )
    model.rules = RULES  # type: ignore[assignment]
    return model


def twice(p: float = 0.3, hidden: int = 16) -> nn.Sequential:
    """One layer that stands in two places, which drop other elements."""
    mlp = MLP(p, hidden)
    return nn.Sequential(nn.Embedding(GPT2_VOCAB, hidden), mlp, mlp, Head(p, hidden, GPT2_VOCAB))


DROPPING = Case("dropping", with_values(dropping), draw_contexts(GPT2_VOCAB))
IN_CONTEXTS = Case(
    "dropping-in-contexts", with_values(partial(dropping, contexts=True)), draw_contexts(GPT2_VOCAB)
)
TWICE = Case("twice", with_values(twice), draw_contexts(GPT2_VOCAB))


class ByHand(nn.Module):
    """The dropout of one place on a single device that sees whole batches: `path` says which."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.path = ""
        self.step = self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        key = key_of(SEED, self.step, self.path, self.calls)
        self.calls += 1
        return value * keep_mask(key, value.shape, self.p, {}, value.device) / (1 - self.p)


def drops_by_hand(model: nn.Module) -> None:
    """Every `nn.Dropout` of a sequence becomes a `ByHand`."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            holder = model.get_submodule(name.rpartition(".")[0])
            setattr(holder, name.rpartition(".")[2], ByHand(module.p))


def run_by_hand(model: nn.Module, value: Tensor, step: int) -> Tensor:
    """What a model of layers gives in a step, with dropouts by hand."""
    assert isinstance(model, nn.Sequential)
    for place, layer in model._modules.items():
        assert layer is not None
        for name, module in layer.named_modules():
            if isinstance(module, ByHand):
                module.step, module.calls = step, 0
                module.path = f"{place}.{name}" if name else place
        value = layer(value)
    return value


def by_hand(
    case: Case, plan: Plan, recipe: Recipe, run: Callable[[nn.Module, Any, int], Any] = run_by_hand
) -> Outcome:
    """The single device; `run` gives the output for inputs in a step."""
    model = materialise(case.build(), torch.float64)
    drops_by_hand(model)
    step = iter(range(recipe.steps * recipe.calls))
    return train_model(
        case,
        model,
        lambda inputs: run(model, inputs, next(step)),
        woven.global_rows(plan),
        recipe,
        torch.float64,
    )
