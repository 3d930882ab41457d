"""Which linears the reference has in float8: those that the engine chooses, found in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.models.choose_float8_linears import choose_linears
from plait.models.layers.layer_sequence import sequence_of
from plait.models.lora import LoraLinear
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.apply_rules import match_modules
from plait.verification.definitions.attention_and_dropout import Definitions
from plait.verification.definitions.float8_linear_selection import linears_in_float8, quantise_linears

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "vocab": 48, "context": 8}


class Block(nn.Module):
    """Linears of all kinds: a table's, an adapted one, one with a hook, one with a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.of_table = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.of_table.weight = self.table.weight
        self.adapted = LoraLinear(nn.Linear(16, 16), rank=16, alpha=1.0)
        self.hooked, self.plain, self.odd = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 24)
        self.hooked.register_forward_hook(lambda *_: None)


MODELS = {
    "gpt2": lambda: plait.models.gpt2(**SIZES, tied=False),
    "llama": lambda: plait.models.llama(**SIZES, kv_heads=1, inner=48),
    "kinds": lambda: nn.Sequential(Block(), nn.Linear(16, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_linears_in_float8_are_those_that_the_engine_chooses(name: str) -> None:
    model = MODELS[name]()
    rules: Any = getattr(model, "rules", {})
    layers = sequence_of(model).layers
    matched = match_modules(rules, [(layer.path, layer.module) for layer in layers]) if rules else {}
    found = linears_in_float8(layers, rules)
    assert found == list(choose_linears(layers, matched).chosen)
    if name == "kinds":
        assert found == ["0.adapted.base", "0.plain"]
    else:
        assert "head.output" not in found


def test_micro_batches_that_run_at_once_are_cast_by_themselves() -> None:
    book, linear = Definitions(), nn.Linear(16, 16)
    layer = NamedLayer("0", nn.Sequential(linear))
    quantise_linears(book, [layer], ["0.0"], "float8")
    inputs = torch.randn(4, 3, 16) * torch.tensor([1.0, 1.0, 9.0, 9.0])[:, None, None]
    each = [linear(part) for part in inputs.chunk(2)]
    assert not torch.equal(linear(inputs), torch.cat(each))
    book.microbatches_at_once = 2
    assert torch.equal(linear(inputs), torch.cat(each))
