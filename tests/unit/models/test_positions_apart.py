"""The layers of plait's models keep positions apart, once attention and positions are marked functions."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases
from plait.autograd.position_marks import gives_positions, positions_may_mix
from plait.layers.layer_sequence import sequence_of
from plait.layers.nested import Value
from plait.layers.position_proof import prove_positions_apart


@positions_may_mix(2, "query", "key", "value")
def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, **options)


class Overlay(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(vars(module) | names)


def mark_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the models of plait use marked functions for attention and positions."""
    from plait.models import rotary
    from plait.models.huggingface import common

    plain = common.attend

    @positions_may_mix(2, "query", "key", "value")
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return plain(query, key, value, **options).unflatten(2, (query.shape[1], -1)).transpose(1, 2)

    marked = {
        "torch": Overlay(torch, arange=gives_positions(torch.arange)),
        "functional": Overlay(functional, scaled_dot_product_attention=attention),
        "rotary_angles": gives_positions(rotary.rotary_angles),
        "attend": lambda *args, **options: attend(*args, **options).transpose(1, 2).flatten(2),
    }
    for module in ("gpt2", "llama", "huggingface.gpt2", "huggingface.llama", "huggingface.gpt_neox"):
        for name, function in marked.items():
            monkeypatch.setattr(import_module(f"plait.models.{module}"), name, function, raising=False)
    monkeypatch.setattr(common.Rotary, "forward", gives_positions(common.Rotary.forward))


def prove_all(model: nn.Module, context: int) -> None:
    value: Value = torch.zeros(2, context, dtype=torch.int64)
    for layer in sequence_of(model).layers:
        value = prove_positions_apart(layer, value)


OWN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: plait.models.gpt2(layers=2, hidden=16, heads=4, vocab=37, context=8),
    "llama": lambda: plait.models.llama(layers=2, hidden=16, heads=4, kv_heads=2, vocab=37, context=8),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_models_keep_positions_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_models(monkeypatch)
    prove_all(OWN_MODELS[name](), 8)


@pytest.mark.transformers
@pytest.mark.parametrize("name", huggingface_cases.MODELS)
def test_adapted_models_keep_positions_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_models(monkeypatch)
    model = plait.models.from_huggingface(huggingface_cases.MODELS[name]())
    prove_all(model, huggingface_cases.GPT2_CONTEXT)
