"""Fingerprints: texts, hashes and structures by which layers and ranks are found to be the same.

A text has a line for each thing that ranks must have alike, `name = value`: where texts differ the line that
differs is shown (`plait.ranks.consistency_check`).
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.layers.comparable_value_text import ValueTexts, attributes_of, digest_of
from plait.models.layers.layer_sequence import LayerSequence, bits_of
from plait.models.result_cache import ResultCache
from plait.package import VERSION
from plait.plan.plan import Plan
from plait.plan.rules import Rule, join
from plait.ranks.accelerator import computation_settings
from plait.ranks.transport.call_description import describe
from plait.schedules.schedule import Schedule
from plait.tensor.find_module_hooks import HOOKS
from plait.tensor.microbatches import Microbatches
from plait.tensor.nested_values import Value, tensors_of

_UNCOUNTED = frozenset(
    {
        *("_parameters", "_buffers", "_modules", *HOOKS),
        *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_full_backward_hook"),
        *("_non_persistent_buffers_set", "_compiled_call_impl"),
    }
)
"""Attributes of every module that are not its own, or that are compared in another way."""
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_VARIABLES_OF_NCCL = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS")
"""Environment variables that change results, or by which NCCL's ranks understand each other."""


def fingerprint(
    model: nn.Module,
    sequence: LayerSequence,
    plan: Plan,
    counts: Sequence[int],
    order: Schedule,
    rules: Mapping[str, Rule],
    loss: object,
    options: Mapping[str, object],
) -> str:
    """Return a text that ranks compare: environment, plan, options, loss, and the model's code and settings.

    That is everything but the values of parameters and buffers: classes and their code, attributes, hooks,
    shapes, dtypes and what trains. `counts`: layers of each stage.
    """
    texts = ValueTexts()
    lines = [*_environment_lines(), *(f"{name} = {texts.of(value)}" for name, value in options.items())]
    lines += [f"plan.{one.name} = {texts.of(getattr(plan, one.name))}" for one in fields(plan)]
    lines += [f"layers per stage = {tuple(counts)}", f"the order of actions = {fingerprint_of_order(order)}"]
    lines += [f"rules of {name} = {texts.of(rule)}" for name, rule in sorted(rules.items())]
    lines += [f"loss = {texts.of_class(type(loss))}"]
    lines += [f"loss.{name} = {texts.of(value)}" for name, value in attributes_of(loss).items()]
    lines += _lines_of_model(model, texts)
    lines += [f"{name} in layers {users}" for name, users in sequence.users.items() if len(users) > 1]
    return "".join(f"{line}\n" for line in lines)


def _environment_lines() -> Iterator[str]:
    """Yield versions, torch's settings and environment variables that change what is computed."""
    yield f"Python = {'.'.join(platform.python_version_tuple()[:2])}"
    yield f"plait = {VERSION}"
    yield f"torch = {torch.__version__.partition('+')[0]}"
    yield from settings_lines()
    for name in (*_VARIABLES, *_VARIABLES_OF_NCCL):
        if name in os.environ:
            yield f"environment variable {name} = {os.environ[name]}"


def settings_lines() -> Iterator[str]:
    """Yield lines of text on torch's settings that change results, such as the default dtype."""
    for name, value in computation_settings().items():
        yield f"{name} = {value}"


def _lines_of_model(model: nn.Module, texts: ValueTexts) -> Iterator[str]:
    """Yield the lines of all modules of a model, in order; for what occurs again, its first name."""
    names: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        place = path or "model"
        if names.setdefault(id(module), place) != place:
            yield f"{place} = {names[id(module)]}"
            continue
        yield f"{place} = {texts.of_class(type(module))}"
        for name, value in attributes_of(module, _UNCOUNTED).items():
            yield f"{place}.{name} = {texts.of(value)}"
        hooks = {kind[1:]: list(vars(module)[kind].values()) for kind in HOOKS if vars(module).get(kind)}
        yield f"hooks of {place} = {texts.of(hooks)}"
        own = {"recurse": False, "remove_duplicate": False}
        for name, tensor in (*module.named_parameters(**own), *module.named_buffers(**own)):
            full = join(path, name)
            known = names.setdefault(id(tensor), full)
            trains = f", requires_grad = {tensor.requires_grad}"
            yield f"{full} = {known if known != full else describe(tensor) + trains}"


def fingerprint_of_order(order: Schedule) -> str:
    """Return a hash of a schedule: the actions of all ranks, in order."""
    rows = "\n".join(" ".join(row) for row in order.order)
    return digest_of(rows.encode())


def fingerprint_of_tokens(*values: Value, every: bool = False) -> str:
    """Return a hash of the integer CPU tensors (tokens) in `values`; with `every` of all tensors.

    With `every` of all tensors. Else those on a GPU are left out, since reading them would block the host,
    and those with fractions, which may be large.
    """
    digest = hashlib.blake2b(digest_size=8)
    whole = [list(value.values) if isinstance(value, Microbatches) else value for value in values]
    for tensor in tensors_of(whole):
        if every or (tensor.device.type == "cpu" and not tensor.is_floating_point()):
            digest.update(f"{tensor.dtype}".encode() + bits_of(tensor))
    return digest.hexdigest()


def lines_of_values(values: Iterable[tuple[str, Tensor]]) -> str:
    """Return a text with one line for each named tensor: its name, and a hash of its bits."""
    lines = []
    for name, value in values:
        lines.append(f"{name} = bits {digest_of(bits_of(value))}")
        del value  # before the next is read
    return "\n".join(lines)


_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, type, Enum),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format),
)
"""Types whose values never change and compare by value, or, as functions do, by identity."""
_COMMON = frozenset({int, float, bool, str, type(None)})
"""The most frequent of them, found without a look at base classes."""


def structure_of(*modules: nn.Module) -> Hashable:
    """Return a description of modules: types, attributes, shapes and dtypes, and which objects recur in them.

    Modules with equal descriptions give outputs of equal shapes and dtypes for such inputs, and equal
    autograd graphs: parameters and buffers count by shape and dtype only, what a `ResultCache` holds does not
    count. Attributes other than numbers, strings, functions, tensors, modules and containers of these compare
    by identity.
    """
    return _Structure(_described(modules, {}))


class _Structure:
    """A description whose hash is computed once."""

    def __init__(self, described: Hashable) -> None:
        self.described = described
        self._hash = hash(described)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.described == other.described)

    def __hash__(self) -> int:
        return self._hash


class _Same:
    """Wrapper that compares equal only to a wrapper of the same object, which it keeps alive."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def _described(thing: Any, numbers: dict[int, int]) -> Hashable:
    """Return a hashable description of `thing`; mutable objects already in `numbers` are given by number."""
    kind = type(thing)
    if kind in _COMMON or isinstance(thing, _PLAIN):
        return kind, thing
    if id(thing) in numbers:
        return "again", numbers[id(thing)]
    if isinstance(thing, set | frozenset):
        return kind, frozenset(_described(item, numbers) for item in thing)
    if not isinstance(thing, nn.Module | Tensor | ResultCache | tuple | list | dict):
        return _Same(thing)
    numbers[id(thing)] = len(numbers)
    if isinstance(thing, nn.Module):
        return kind, _items(vars(thing), numbers)
    if isinstance(thing, Tensor):
        own = _items(vars(thing), numbers) if vars(thing) else ()
        return kind, tuple(thing.shape), thing.stride(), thing.dtype, thing.requires_grad, own
    if isinstance(thing, ResultCache):
        return (kind,)
    if isinstance(thing, tuple):
        return kind, tuple(_described(item, numbers) for item in thing)
    return kind, _items(thing if isinstance(thing, dict) else dict(enumerate(thing)), numbers)


def _items(items: dict[Any, Any], numbers: dict[int, int]) -> Hashable:
    return tuple((_described(key, numbers), _described(value, numbers)) for key, value in items.items())
