"""The models of the parity tests: GPT-2, and one for each way in which a user's model can be awkward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import plait
from parity import models as m
from parity.case import Batch, Case, DrawBatch
from parity.models import CLASSES, HIDDEN, VOCAB
from plait.tensor.losses import CrossEntropy

LENGTH = 4
GPT2_VOCAB = 37
GPT2_CONTEXT = 8

Build = Callable[[], nn.Module]


def gpt2(*, layers: int = 2, tied: bool = True) -> Case:
    """A small GPT-2 on the meta device, on full contexts of random tokens."""

    def build() -> nn.Module:
        return plait.models.gpt2(
            layers=layers, hidden=16, heads=2, vocab=GPT2_VOCAB, context=GPT2_CONTEXT, tied=tied
        )

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(GPT2_VOCAB, (rows, GPT2_CONTEXT + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    return Case("gpt2", build, draw)


def single_module() -> Case:
    """A model that is no sequence."""
    return Case("single_module", with_values(lambda: m.Idle()), draw_vectors)


def with_values(build: Build) -> Build:
    """A build with real values (not on the meta device), the same on every rank."""

    @wraps(build)
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return build()

    return seeded


def frozen(module: nn.Module) -> nn.Module:
    """The module, none of whose parameters is trained."""
    return module.requires_grad_(False)


# ── data ──


def draw_tokens(rows: int, generator: torch.Generator) -> Batch:
    """Tokens `[rows, LENGTH]` and a class for each."""
    inputs = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    return inputs, torch.randint(CLASSES, (rows, LENGTH), generator=generator)


def draw_vectors(rows: int, generator: torch.Generator) -> Batch:
    """Vectors `[rows, HIDDEN]` and a class for each."""
    inputs = torch.randn(rows, HIDDEN, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def draw_images(rows: int, generator: torch.Generator) -> Batch:
    """Images `[rows, 1, 5, 5]` and a class for each."""
    inputs = torch.randn(rows, 1, 5, 5, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def draw_dictionary(rows: int, generator: torch.Generator) -> Batch:
    """Tokens, segments and importance, and classes."""
    tokens, targets = draw_tokens(rows, generator)
    segments = torch.randint(3, (rows, LENGTH), generator=generator)
    importance = torch.rand(rows, LENGTH, generator=generator)
    return {"tokens": tokens, "segments": segments, "importance": importance}, targets


def draw_tuple(rows: int, generator: torch.Generator) -> Batch:
    """The same without names."""
    inputs, targets = draw_dictionary(rows, generator)
    return tuple(inputs.values()), targets


def draw_ignored(rows: int, generator: torch.Generator) -> Batch:
    """Counts that differ from row to row; nothing counts in the first micro-batch of the first rank."""
    inputs, targets = draw_tokens(rows, generator)
    kept = torch.rand(rows, LENGTH, generator=generator) < torch.linspace(0.1, 1, rows).unsqueeze(1)
    kept[:2] = False
    return inputs, targets.masked_fill(~kept, -100)


def draw_weighted(rows: int, generator: torch.Generator) -> Batch:
    """Vectors to fit, each with a weight of its own."""
    inputs, _ = draw_vectors(rows, generator)
    targets = torch.randn(rows, CLASSES, generator=generator)
    return inputs, {"target": targets, "weight": torch.rand(rows, generator=generator) + 0.1}


def draw_regression(rows: int, generator: torch.Generator) -> Batch:
    """Vectors to fit."""
    inputs, targets = draw_weighted(rows, generator)
    return inputs, targets["target"]


# ── losses ──


@dataclass(frozen=True)
class Squares:
    """The mean squared error."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()

    def weight(self, targets: Tensor) -> Tensor:
        return torch.tensor(targets.numel())


@dataclass(frozen=True)
class WeightedSquares:
    """Squared errors, each row by its weight, over the sum of the weights."""

    def total(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return ((output - targets["target"]).square().sum(-1) * targets["weight"]).sum()

    def weight(self, targets: dict[str, Tensor]) -> Tensor:
        return targets["weight"].sum()


def mean_weighted_squares(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """The same over the whole batch."""
    weight = targets["weight"] / targets["weight"].sum()
    return ((output - targets["target"]) ** 2).sum(1).dot(weight)


def mean_smoothed(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels; those of class 0 do not count."""
    logits, labels = output.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1)


# ── models: four layers or more, so that four stages can be cut ──


def on_meta() -> nn.Module:
    """Initialised by its modules' own `reset_parameters`."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(HIDDEN, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        )


def convolution() -> nn.Module:
    """Activations in place, and layers without parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(inplace=True),
        nn.GroupNorm(3, 3),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(27, CLASSES),
    )


def in_place() -> nn.Module:
    """Layers that write to their input, at boundaries and inside."""
    return nn.Sequential(
        nn.Linear(HIDDEN, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Linear(6, CLASSES),
    )


def dictionary() -> nn.Module:
    """A dictionary from the batch to the second layer, then tuples."""
    return nn.Sequential(m.Open(), m.Unpack(), m.Mix(), m.Mix(), m.Close())


def tuples() -> nn.Module:
    """Tuples all the way."""
    return nn.Sequential(m.Open(), m.Mix(), m.Mix(), m.Close())


def skips() -> nn.Module:
    """Nested containers in which a tensor stands twice, goes by untouched or has lost its gradient."""
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), m.Fork(), m.Carry(), m.Carry(), m.Join(), nn.Linear(HIDDEN, CLASSES)
    )


def frozen_first() -> nn.Module:
    """Nothing to train in the first two layers."""
    return nn.Sequential(
        frozen(nn.Embedding(VOCAB, HIDDEN)),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES),
    )


def frozen_first_vectors() -> nn.Module:
    """The same on floating-point inputs, whose gradient may be wanted all the same."""
    return nn.Sequential(
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.ReLU(inplace=True),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Linear(HIDDEN, CLASSES),
    )


def frozen_rest() -> nn.Module:
    """Nothing to train but in the first layer: gradients go all the way and stay nowhere else."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Tanh(),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        frozen(nn.Linear(HIDDEN, CLASSES)),
    )


def half_frozen() -> nn.Module:
    """Linears with a frozen weight and a trainable bias, or the other way round."""
    model = nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)
    )
    model[0].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def twice_in_a_layer() -> nn.Module:
    """A parameter used twice in one layer, and a subclassed and a parametrised linear."""
    return nn.Sequential(
        m.DoubledLinear(HIDDEN, HIDDEN),
        m.Twice(),
        weight_norm(nn.Linear(HIDDEN, HIDDEN)),
        m.Twice(),
        nn.Linear(HIDDEN, CLASSES),
    )


def repeated() -> nn.Module:
    """The same module three times in the sequence."""
    shared = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Sigmoid(), shared, nn.Linear(HIDDEN, CLASSES))


def crossing_ties() -> nn.Module:
    """Ties whose holders cross each other: no two ranks may wait for each other's reductions."""
    layers = [nn.Linear(HIDDEN, HIDDEN) for _ in range(5)]
    layers[2].weight = layers[0].weight
    layers[3].weight = layers[1].weight
    layers[4].bias = layers[0].bias
    layers[4].weight = layers[3].weight
    return nn.Sequential(*layers, nn.Linear(HIDDEN, CLASSES))


def tied_table() -> nn.Module:
    """An embedding table that another layer multiplies with; frozen bits beside it."""
    embedding = nn.Embedding(VOCAB, HIDDEN)
    head = m.TiedHead(embedding)
    return nn.Sequential(
        embedding, frozen(nn.Linear(HIDDEN, HIDDEN)), nn.Tanh(), head, nn.Linear(VOCAB, CLASSES)
    )


def unused() -> nn.Module:
    """Parameters that the loss does not depend on."""
    return nn.Sequential(m.Idle(), nn.Tanh(), m.Idle(), nn.Linear(HIDDEN, CLASSES))


def nested() -> nn.Module:
    """Sequences in sequences."""
    inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)))
    return nn.Sequential(nn.Sequential(nn.Embedding(VOCAB, HIDDEN)), inner, nn.Linear(HIDDEN, CLASSES))


def padded() -> nn.Module:
    """An embedding with a row that does not learn."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN, padding_idx=2),
        nn.LayerNorm(HIDDEN),
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        nn.Linear(HIDDEN, CLASSES),
    )


def buffers() -> nn.Module:
    """Buffers with values."""
    return nn.Sequential(m.Standardise(), nn.Tanh(), m.Standardise(), nn.Linear(HIDDEN, CLASSES))


def attention() -> nn.Module:
    """PyTorch's own attention."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), m.SelfAttention(), m.SelfAttention(), nn.Linear(HIDDEN, CLASSES)
    )


def moody() -> nn.Module:
    """Another function in evaluation mode."""
    return nn.Sequential(m.Moody(), nn.Tanh(), m.Moody(), nn.Linear(HIDDEN, CLASSES))


def _case(build: Build, draw: DrawBatch, **loss: Any) -> Case:
    name = build.__name__
    return Case(loss.pop("name", name), with_values(build), draw, **loss)


SMOOTHED = CrossEntropy(ignore_index=0, label_smoothing=0.1)
USER_CASES = (
    Case("on_meta", on_meta, draw_vectors),
    _case(convolution, draw_images),
    _case(in_place, draw_vectors),
    _case(dictionary, draw_dictionary),
    _case(tuples, draw_tuple),
    _case(skips, draw_vectors),
    _case(frozen_first, draw_tokens),
    _case(frozen_first_vectors, draw_vectors),
    _case(frozen_rest, draw_tokens),
    _case(half_frozen, draw_vectors),
    _case(twice_in_a_layer, draw_vectors),
    _case(repeated, draw_vectors),
    _case(crossing_ties, draw_vectors),
    _case(tied_table, draw_tokens),
    _case(unused, draw_vectors),
    _case(nested, draw_tokens),
    _case(padded, draw_tokens),
    _case(buffers, draw_vectors),
    _case(attention, draw_tokens),
    _case(moody, draw_vectors),
    _case(padded, draw_ignored, name="ignored_targets"),
    _case(padded, draw_tokens, name="smoothed_labels", loss=SMOOTHED, mean=mean_smoothed),
    _case(half_frozen, draw_regression, name="squares", loss=Squares(), mean=functional.mse_loss),
    _case(
        half_frozen, draw_weighted, name="weighted", loss=WeightedSquares(), mean=mean_weighted_squares
    ),
)
