"""The cases of the parity tests: GPT-2, and the users' models with their data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import plait
from parity import data, layers, models
from parity.case import Batch, Case, DrawBatch
from plait.tensor.losses import CrossEntropy

GPT2_VOCAB = 37
GPT2_CONTEXT = 8
ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""The policies with one stage a rank: any model of as many layers as ranks can be cut for them."""

Build = Callable[[], nn.Module]


@cache
def gpt2(
    *, layers: int = 2, tied: bool = True, hidden: int = 16, heads: int = 2, vocab: int = GPT2_VOCAB
) -> Case:
    """A small GPT-2 on the meta device, on full contexts of random tokens."""

    def build() -> nn.Module:
        return plait.models.gpt2(
            layers=layers, hidden=hidden, heads=heads, vocab=vocab, context=GPT2_CONTEXT, tied=tied
        )

    return Case("gpt2", build, draw_contexts(vocab))


@cache
def llama(
    *, layers: int = 2, tied: bool = True, heads: int = 4, kv_heads: int = 2, vocab: int = GPT2_VOCAB
) -> Case:
    """A small Llama likewise, whose heads have 4 features each."""

    def build() -> nn.Module:
        sizes = {"hidden": 4 * heads, "heads": heads, "kv_heads": kv_heads, "inner": 6 * heads}
        return plait.models.llama(layers=layers, vocab=vocab, context=GPT2_CONTEXT, tied=tied, **sizes)

    return Case("llama", build, draw_contexts(vocab))


@cache
def sparse_llama(
    *, layers: int = 2, experts: int = 5, top_k: int = 2, shared: int = 8, wide: bool = False
) -> Case:
    """A small Llama with experts; `wide`: also halves of its matrices have sizes that are multiples of 16."""
    hidden, kv_heads, inner = (32, 4, 32) if wide else (16, 2, 12)

    def build() -> nn.Module:
        sizes = {"hidden": hidden, "heads": 4, "kv_heads": kv_heads, "inner": inner, "layers": layers}
        sizes |= {"vocab": GPT2_VOCAB}
        sparse = {"experts": experts, "top_k": top_k, "shared": shared}
        return plait.models.llama(context=GPT2_CONTEXT, **sizes, **sparse)

    return Case("sparse_llama", build, draw_contexts(GPT2_VOCAB))


def draw_contexts(vocab: int) -> DrawBatch:
    """Full contexts of random tokens, the next token as the target."""

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocab, (rows, GPT2_CONTEXT + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    return draw


@cache
def single_module() -> Case:
    """A model that is no sequence."""
    return Case("single_module", with_values(lambda: layers.Idle()), data.draw_vectors)


def with_values(build: Build) -> Build:
    """A build with real values (not on the meta device), the same on every rank."""

    @wraps(build)
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return build()

    return seeded


def case(build: Build, draw: DrawBatch, name: str | None = None, **loss: Any) -> Case:
    """A case with real values, named after its model unless told."""
    return Case(name or build.__name__, with_values(build), draw, **loss)


SMOOTHED = CrossEntropy(ignore_index=0, label_smoothing=0.1)
USER_CASES = (
    Case("on_meta", models.on_meta, data.draw_vectors),
    case(models.convolution, data.draw_images),
    case(models.in_place, data.draw_vectors),
    case(models.dictionary, data.draw_dictionary),
    case(
        models.dictionary_to_the_end,
        data.draw_dictionary,
        loss=data.NamedCrossEntropy(),
        mean=data.mean_of_named,
    ),
    case(models.tuples, data.draw_tuple),
    case(models.skips, data.draw_vectors),
    case(models.frozen_first, data.draw_tokens),
    case(models.frozen_first_vectors, data.draw_vectors),
    case(models.frozen_rest, data.draw_tokens),
    case(models.half_frozen, data.draw_vectors),
    case(models.twice_in_a_layer, data.draw_vectors),
    case(models.repeated, data.draw_vectors),
    case(models.crossing_ties, data.draw_vectors),
    case(models.tied_table, data.draw_tokens),
    case(models.unused, data.draw_vectors),
    case(models.views, data.draw_tokens),
    case(models.nested, data.draw_tokens),
    case(models.padded, data.draw_tokens),
    case(models.transposed, data.draw_tokens),
    case(models.buffers, data.draw_vectors),
    case(models.attention, data.draw_tokens),
    case(models.recurrent, data.draw_tokens),
    case(models.recomputed, data.draw_vectors),
    case(models.moody, data.draw_vectors),
    case(models.padded, data.draw_ignored, name="ignored_targets"),
    case(models.padded, data.draw_tokens, name="smoothed_labels", loss=SMOOTHED, mean=data.mean_smoothed),
    case(
        models.half_frozen,
        data.draw_regression,
        name="squares",
        loss=data.Squares(),
        mean=functional.mse_loss,
    ),
    case(
        models.half_frozen,
        data.draw_weighted,
        name="weighted",
        loss=data.WeightedSquares(),
        mean=data.mean_weighted_squares,
    ),
)
