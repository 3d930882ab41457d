"""Initial values of both runs, in which no parameter is all zeros or ones.

Initial zeros and ones hide mistakes: a bias of zero may be added any number of times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from plait.models.initial_values import initial_value, normal_values
from plait.models.layers.layer_sequence import copy_attributes, sequence_of
from plait.plan.rules import join
from plait.tensor.find_module_hooks import computed_by_hooks

OFFSET = 0.1
"""Standard deviation of the offset, relative to the root mean square of a parameter."""
OFFSET_OF_ZEROS = 0.02
"""Standard deviation of the offset of a parameter that is zero."""


ValueChange = Callable[[str, Tensor], Tensor]
"""Given the name and value of a parameter or buffer, returns its new value."""


def add_offsets(seed: int) -> ValueChange:
    """Return a function that adds random offsets to a tensor, which depend on name, seed and index only."""

    def change(name: str, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        size = float(value.double().square().mean().sqrt()) if value.numel() else 0.0
        offset = normal_values(f"{name}/moved", seed, value.numel(), OFFSET * size or OFFSET_OF_ZEROS)
        return value + offset.view(value.shape).to(value)

    return change


def with_values(model: nn.Module, seed: int, parameters: ValueChange, buffers: ValueChange) -> nn.Module:
    """Return a copy of `model` whose floating-point tensors are changed by `parameters` and `buffers`.

    Shared tensors stay shared. `model` may be on the meta device; it is not altered.
    """
    layers = sequence_of(model).layers
    memo: dict[int, object] = {id(tensor): tensor.detach() for tensor in computed_by_hooks(model)}
    for layer in layers:
        named = ((layer.module.named_parameters(), parameters), (layer.module.named_buffers(), buffers))
        for local, tensor, change in ((*one, change) for tensors, change in named for one in tensors):
            if id(tensor) not in memo:
                value = initial_value(layer.module, layer.path, local, seed)
                if value.is_floating_point():
                    value = change(join(layer.path, local), value)
                is_parameter = isinstance(tensor, nn.Parameter)
                value = value.clone()
                copied = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                copy_attributes(tensor, copied)
                memo[id(tensor)] = copied
    return copy.deepcopy(model, memo)


def unchanged(name: str, value: Tensor) -> Tensor:
    """Return `value`: the change of initial values that leaves them as they are."""
    return value
