"""The linears of a model that a plan computes in float8, with forwards by definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from plait.tensor.layer_values import NamedLayer
from plait.verification.definitions.float8 import Casting, float8_linear
from plait.verification.definitions.functions import Definitions

MULTIPLE = 16
"""The sizes that a linear in float8 has are multiples of it."""


def quantise_linears(
    book: Definitions, layers: Sequence[NamedLayer], recipe: str, casting: Casting = nullcontext
) -> None:
    """Make the linears of `layers` that are in float8 under `Plan(linears=recipe)` compute by definition.

    `casting` returns the context in which operands are cast.
    """
    for layer in layers[:-1]:
        for module, transposed in linears_in_float8(layer.module):
            linear = partial(float8_linear, recipe=recipe, casting=casting)
            module.forward = partial(_by_microbatch, book, proxy(module), linear, transposed)


def linears_in_float8(layer: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the linears in a layer that float8 computes, and whether their weight is `[in, out]`.

    Those of torch, and `Conv1D` of transformers, whose sizes are multiples of 16.
    """
    for module in layer.modules():
        is_linear, is_transposed = type(module) is nn.Linear, type(module).__name__ == "Conv1D"
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or not (is_linear or is_transposed) or "forward" in vars(module):
            continue
        if all(size % MULTIPLE == 0 for size in weight.shape):
            yield module, is_transposed


def _by_microbatch(
    book: Definitions, module: Any, linear: Callable[..., Tensor], transposed: bool, input: Tensor
) -> Tensor:
    """Return the output of a linear, whose input is cast by micro-batches of equal size."""
    weight = module.weight.T if transposed else module.weight
    parts = [linear(part, weight, module.bias) for part in input.chunk(book.microbatches_at_once)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
