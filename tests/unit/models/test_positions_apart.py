"""The layers of plait's models keep positions apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import plait
from parity import huggingface_cases
from parity.pairs import in_quick
from plait.models.layers.layer_sequence import sequence_of
from plait.proof.position_proof import prove_positions_apart
from plait.tensor.nested_values import Value


def prove_all(model: nn.Module, context: int) -> None:
    value: Value = torch.zeros(2, context, dtype=torch.int64)
    for layer in sequence_of(model).layers:
        value = prove_positions_apart(layer, value)


OWN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: plait.models.gpt2(layers=2, hidden=16, heads=4, vocab=37, context=8),
    "llama": lambda: plait.models.llama(layers=2, hidden=16, heads=4, kv_heads=2, vocab=37, context=8),
}

QUICK = ("gpt2", "gpt-neox", "gemma3-capped-untied", "qwen2-moe-partly-dense", "gpt-oss", "deepseek-v3")
"""Families with an attention, a norm or experts of their own."""


@pytest.mark.parametrize("name", OWN_MODELS)
def test_plaits_models_keep_positions_apart(name: str) -> None:
    prove_all(OWN_MODELS[name](), 8)


@pytest.mark.transformers
@pytest.mark.parametrize("name", in_quick(huggingface_cases.MODELS, *QUICK))
def test_adapted_models_keep_positions_apart(name: str) -> None:
    model = plait.models.from_huggingface(huggingface_cases.MODELS[name]())
    prove_all(model, huggingface_cases.GPT2_CONTEXT)
