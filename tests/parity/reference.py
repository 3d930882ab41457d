"""The single device in plain PyTorch: autograd, `torch.nn.utils`, `torch.optim`; nothing of plait's engine.

Two things are agreed on and therefore shared: the initial values of tensors on the meta device, and that a
trainable parameter that no loss depends on has a gradient of zero (autograd would leave None, and an
optimizer would then not decay it).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.case import SEED, WEIGHT_DECAY, Case, Recipe
from parity.outcome import Outcome
from plait.models.initial_values import initial_value


def materialise(model: nn.Module, dtype: torch.dtype, seed: int = SEED) -> nn.Module:
    """A copy of `model` with values, its floating-point tensors in `dtype`. What is shared stays shared."""
    values: dict[int, object] = {}
    for path, layer in _layers(model, ""):
        for name, parameter in layer.named_parameters():
            value = initial_value(layer, path, name, seed).clone()
            values.setdefault(id(parameter), nn.Parameter(value, parameter.requires_grad))
        for name, buffer in layer.named_buffers():
            values.setdefault(id(buffer), initial_value(layer, path, name, seed).clone())
    return copy.deepcopy(model, values).to(dtype)


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested sequences with their paths."""
    if not isinstance(module, nn.Sequential):
        yield path, module
        return
    for name, child in module._modules.items():
        assert child is not None
        yield from _layers(child, f"{path}.{name}" if path else name)


@lru_cache(maxsize=256)
def train(case: Case, rows: int, recipe: Recipe, dtype: torch.dtype) -> Outcome:
    """Carry out `recipe` on global batches of `rows` rows; once for all layouts that are given the same."""
    model = materialise(case.build(), dtype)
    return train_model(case, model, partial(case.reference, model), rows, recipe, dtype)


def train_model(
    case: Case, model: nn.Module, run: Callable[[Any], Any], rows: int, recipe: Recipe, dtype: torch.dtype
) -> Outcome:
    """The same for a model that has values; `run` says what it gives."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = recipe.make_optimizer(groups)
    outcome = Outcome()
    batches = iter(case.batches(rows, recipe.steps * recipe.calls, dtype))
    for step in range(recipe.steps):
        for _ in range(recipe.calls):
            inputs, targets = next(batches)
            loss = case.mean(run(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            outcome.losses.append(loss.item())
        if step == 0:
            outcome.gradients = gradients_of(model)
        outcome.norms.append(float(nn.utils.clip_grad_norm_(trainable, recipe.clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    outcome.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return outcome


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every trainable parameter by its full name."""
    found: Mapping[str, Tensor | None] = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
