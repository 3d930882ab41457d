"""Models with adapters whose values are all drawn, and the cases made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plait
from parity import cases, reference
from parity.case import SEED, Case


def adapted(build: Callable[[], nn.Module], **options: Any) -> nn.Module:
    """The model with adapters in float64, all drawn anew: `up` begins at zero, which hides `down`."""
    model = plait.lora(build(), rank=3, alpha=5, **options)
    if next(model.parameters()).is_meta:
        model = reference.materialise(model, torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    return model


def case(plain: Case, **options: Any) -> Case:
    """A case whose model has adapters."""
    return Case(f"{plain.name} with adapters", lambda: adapted(plain.build, **options), plain.draw)


GPT2 = case(cases.gpt2(layers=1, heads=4))
LLAMA = case(cases.llama(layers=1))
SOME = case(cases.llama(tied=False), targets=("blocks.0.*.query", "value", "*.mlp.down", "head.output"))
UNTIED = case(cases.gpt2(heads=4, tied=False), targets=("head.output", "output"))
DROPPING = case(cases.gpt2(layers=1, heads=4), dropout=0.2)
