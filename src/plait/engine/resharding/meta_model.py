"""The model of an engine, put together again from its layers, without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from plait.models.layers.layer_sequence import LayerSequence

Tree: TypeAlias = dict[str, "nn.Module | Tree"]
"""Layers by the names in their paths."""


def meta_model(sequence: LayerSequence, context: int | None) -> nn.Module:
    """Return a model of these layers under their paths: nested `nn.Sequential`s, or its only layer itself.

    `context` becomes the attribute by which a model tells its longest sequence.
    """
    tree: Tree = {}
    for layer in sequence.layers:
        if not layer.path:
            return layer.module
        *outer, last = layer.path.split(".")
        inner = tree
        for name in outer:
            below = inner.setdefault(name, {})
            assert isinstance(below, dict), "what has layers inside is none itself"
            inner = below
        inner[last] = layer.module
    model = _sequential(tree)
    if context is not None:
        vars(model)["context"] = context
    return model


def _sequential(tree: Mapping[str, nn.Module | Tree]) -> nn.Sequential:
    """Return nested containers of the layers, in order."""
    container = nn.Sequential()
    for name, one in tree.items():
        container.add_module(name, _sequential(one) if isinstance(one, dict) else one)
    return container
