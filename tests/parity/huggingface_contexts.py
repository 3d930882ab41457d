"""Models of transformers on sequences divided over `cp`, or packed, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import plait
from parity import huggingface_cases as cases
from parity.case import Batch, Case
from parity.contexts import packed
from parity.dropping import ByHand, run_by_hand
from plait.models.huggingface import families as decoder
from plait.models.huggingface import gpt
from plait.ranks.group import Group, Traffic
from plait.tensor.attention import SharedKeys
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.running_sequence import ContextParallelism, running

HEADS, KEY_HEADS, WINDOW = 6, 2, 3
SHARED = {"heads": HEADS, "kv_heads": KEY_HEADS}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": partial(cases.gpt2, heads=HEADS),
    "llama": partial(cases.llama, **SHARED),
    "qwen2-sliding": partial(
        cases.qwen2, **SHARED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral": partial(cases.mistral, **SHARED),
    "gpt-neox": partial(cases.gpt_neox, heads=HEADS),
}
"""Mistral has a window in each layer, Qwen2 in the second."""
MORE: dict[str, Callable[..., nn.Module]] = {
    "qwen3": partial(cases.qwen3, **SHARED),
    "gemma2": partial(cases.gemma2, **SHARED),
    "gemma3": partial(cases.gemma3, **SHARED),
    "phi3": partial(cases.phi3, **SHARED),
    "olmo2": partial(cases.olmo2, **SHARED),
    "smollm3": partial(cases.smollm3, **SHARED),
    "gpt-oss": partial(cases.gpt_oss, **SHARED),
    "deepseek-v3": partial(cases.deepseek_v3, heads=HEADS),
    "deepseek-dense": partial(cases.deepseek_v3, heads=HEADS, first_k_dense_replace=2),
    "mixtral": partial(cases.mixtral, **SHARED),
    "qwen2-moe": partial(cases.qwen2_moe, **SHARED),
    "qwen3-moe": partial(cases.qwen3_moe, **SHARED),
    "olmoe": partial(cases.olmoe, **SHARED),
}
"""Families whose layers are those of Llama, but for what they declare: they take fewer plans."""
P = 0.3
DROPPING: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(make, attention_dropout=P) for name, make in MODELS.items()},
    "gpt2": partial(MODELS["gpt2"], attn_pdrop=P, resid_pdrop=P, embd_pdrop=P),
    "gpt-neox": partial(MODELS["gpt-neox"], attention_dropout=P, hidden_dropout=P),
}


@cache
def case(name: str, length: int, *, in_documents: bool = False, drops: bool = False) -> Case:
    """A model on sequences of tokens of some length, perhaps packed from documents.

    The reference is the model of transformers, each document alone.
    """

    def build() -> nn.Module:
        theirs = cases.drawn((DROPPING if drops else MODELS | MORE)[name])
        sequence = plait.models.from_huggingface(theirs)
        sequence.theirs = (theirs,)  # type: ignore[assignment]  # no module of the sequence
        return sequence

    def draw(rows: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(cases.GPT2_VOCAB, (rows, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()

    made = Case(f"{name}-{length}-{drops}", build, draw, reference=by_transformers)
    return packed(made, length) if in_documents else made


def by_transformers(sequence: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of the model of transformers, whose parameters are those of the sequence."""
    (theirs,) = sequence.theirs  # type: ignore[misc]
    logits: Tensor = theirs(input_ids=tokens).logits
    return logits


def dropping_by_hand(model: nn.Module, inputs: Any, step: int) -> Tensor:
    """The output of plait's layers on one device, with dropouts by hand and a mask of all pairs."""
    tokens, bounds = inputs, None
    if isinstance(inputs, dict):
        tokens, bounds = inputs["tokens"], document_bounds(inputs["document_ids"])
    alone = ContextParallelism(Group("cp", (0,), 0, None, Traffic(), 0.0))
    sequence = alone.sequence(tokens.shape[1], bounds)
    with ExitStack() as entered:
        for module in (decoder, gpt):
            entered.enter_context(patch.object(module, "attend", explicitly))
        entered.enter_context(running(sequence))
        return run_by_hand(model, tokens, step)


def explicitly(
    query: Tensor,
    keys: SharedKeys,
    *,
    scale: float,
    dropout: ByHand,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to the shared keys of one device, with the weights of all pairs."""
    assert sinks is None, "families with sinks have no dropout in these cases"
    groups, length = query.shape[1] // keys.key.shape[1], query.shape[2]
    key, value = (one.repeat_interleave(groups, 1) for one in (keys.key, keys.value))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = ((distance < 0) | (distance >= (keys.mask.window or length)))[None]
    if keys.sequence is not None and keys.sequence.documents is not None:
        starts = torch.from_numpy(keys.sequence.documents.by_position()[0])
        hidden = hidden | (starts[:, :, None] != starts[:, None])
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    result: Tensor = dropout(scores.softmax(-1)) @ value
    return result
