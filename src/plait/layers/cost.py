"""What a layer costs beside the others, for cutting stages evenly before anything has run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from plait.layers.layer_sequence import NamedLayer


def layer_costs(layers: Sequence[NamedLayer]) -> list[float]:
    """The relative cost of each layer: what its `cost()` says, else the elements of its matrices.

    An element of a matrix is one multiplication a token; a looked-up table costs next to nothing.
    """
    return [_cost(layer.module) for layer in layers]


def _cost(module: nn.Module) -> float:
    own = getattr(module, "cost", None)
    if callable(own):
        return float(own())
    matrices = (
        parameter.numel()
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
        if parameter.dim() >= 2
    )
    return float(1 + sum(matrices))
