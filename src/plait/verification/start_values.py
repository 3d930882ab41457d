"""The values that both sides start from: the model's own, a little moved; or small whole numbers.

What starts at zero or one hides mistakes: a bias of zero may be added as often as one likes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from plait.layers.layer_sequence import sequence_of
from plait.models.initial import initial_value, normal_values
from plait.rules import join

MOVED = 0.1
"""Standard deviation of what is added, relative to the root mean square of a parameter."""
FROM_ZERO = 0.02
"""The same for a parameter that is zero."""

ValueChange = Callable[[str, Tensor], Tensor]
"""Given a parameter's or buffer's name and value, another value."""


def moved(seed: int) -> ValueChange:
    """Normally distributed moves that depend on the name, the seed and the index only."""

    def change(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        size = float(value.double().square().mean().sqrt()) if value.numel() else 0.0
        move = normal_values(f"{name}/moved", seed, 0, value.numel(), MOVED * size or FROM_ZERO)
        return value + move.view(value.shape).to(value)

    return change


def with_values(model: nn.Module, seed: int, parameters: ValueChange, buffers: ValueChange) -> nn.Module:
    """A copy of `model` in which each floating-point parameter and buffer has a value, and that changed.

    What is shared stays shared. `model` may be on the meta device; it is not altered.
    """
    memo: dict[int, object] = {}
    for layer in sequence_of(model).layers:
        for local, parameter in layer.module.named_parameters():
            if id(parameter) not in memo:
                value = initial_value(layer.module, layer.path, local, seed)
                if value.is_floating_point():
                    value = parameters(join(layer.path, local), value)
                memo[id(parameter)] = nn.Parameter(value.clone(), parameter.requires_grad)
        for local, buffer in layer.module.named_buffers():
            if id(buffer) not in memo:
                value = initial_value(layer.module, layer.path, local, seed)
                if value.is_floating_point():
                    value = buffers(join(layer.path, local), value)
                memo[id(buffer)] = value.clone()
    return copy.deepcopy(model, memo)


def unchanged(name: str, value: Tensor) -> Tensor:
    """As it is."""
    return value
