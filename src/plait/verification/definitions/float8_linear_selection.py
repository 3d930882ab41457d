"""The linears of a model that a plan computes in float8, with forwards by definition.

As `docs/guides/float8.md` says it: all linears of torch, and `Conv1D` of transformers, but the last linear of
the model; those with the rule `vocabulary`, `replicated` or `partitioned`; halves of LoRA's adapters; those
whose weight another module has too; those of a subclass of `nn.Linear`; those with hooks or a forward of
their own; those with a size that is no multiple of 16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from plait.models.lora import LoraLinear
from plait.plan.rules import Rule, Rules, join, match
from plait.tensor.find_module_hooks import is_altered
from plait.tensor.named_layer import NamedLayer
from plait.verification.definitions.attention_and_dropout import Definitions
from plait.verification.definitions.float8 import Casting, Computation, float8_linear

MULTIPLE = 16
IN_16_BITS = ("vocabulary", "replicated", "partitioned")
"""The kinds of rules whose linears are not in float8."""


def quantise_linears(
    book: Definitions,
    layers: Sequence[NamedLayer],
    paths: Sequence[str],
    recipe: str,
    casting: Casting = nullcontext,
) -> None:
    """Replace the forwards of the linears of `layers` at `paths` by plain definitions in float8.

    `recipe`: by its name in `Plan.linears`. `casting` returns the context in which operands are cast.
    """
    modules = modules_of(layers)
    for path in paths:
        computation = Computation(recipe, casting, partial(_note, book, path))
        modules[path].forward = partial(_by_microbatch, book, proxy(modules[path]), computation)


def modules_of(layers: Sequence[NamedLayer]) -> dict[str, nn.Module]:
    """Return all modules in `layers` by path, in the order of the model."""
    return {
        join(layer.path, name): module
        for layer in layers
        for name, module in layer.module.named_modules(remove_duplicate=False)
    }


def linears_in_float8(layers: Sequence[NamedLayer], rules: Rules) -> list[str]:
    """Return the paths of the linears of a model that `Plan.linears` computes in float8."""
    modules = modules_of(layers)
    matched, adapted = match(rules, modules), {path for path in modules if _is_adapted(modules[path])}
    linears = [
        path
        for path, module in modules.items()
        if (isinstance(module, nn.Linear) or _is_transposed(module))
        and not any(path in (join(one, "down"), join(one, "up")) for one in adapted)
    ]
    return [path for path in linears[:-1] if _is_in_float8(path, modules, matched)]


def _is_in_float8(path: str, modules: Mapping[str, nn.Module], rules: Mapping[str, Rule]) -> bool:
    """Return whether a linear that is not the model's last is in float8."""
    module: Any = modules[path]
    holders = [
        other
        for other in set(modules.values())
        if any(parameter is module.weight for parameter in other.parameters(recurse=False))
    ]
    is_plain = type(module) is nn.Linear or _is_transposed(module)
    is_multiple = all(size % MULTIPLE == 0 for size in module.weight.shape)
    has_other_rule = path in rules and rules[path].kind in IN_16_BITS
    alone = len(holders) == 1 and is_plain
    return is_multiple and alone and not has_other_rule and not is_altered(module)


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, LoraLinear)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _by_microbatch(book: Definitions, module: Any, computation: Computation, input: Tensor) -> Tensor:
    """Return the output of a linear, whose input is cast by micro-batches of equal size."""
    weight = module.weight.T if _is_transposed(module) else module.weight
    parts = input.chunk(book.microbatches_at_once)
    outputs = [float8_linear(part, weight, module.bias, computation) for part in parts]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _note(book: Definitions, path: str, operand: str, unit: Tensor) -> None:
    if not book.is_mistaken:
        book.scales.note(path, operand, unit)
