"""A model as a sequence of layers: flattened, with shared parameters, copied, in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from plait.errors import ModelError
from plait.plan.rules import join
from plait.tensor.dropout import from_plain_dropout, is_plain_dropout
from plait.tensor.dtypes import convert
from plait.tensor.experts.active_parameters import active_elements
from plait.tensor.find_module_hooks import computed_by_hooks, hook_objects, shared_objects
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import tensors_of

MISSING = object()
"""The value of an attribute that a module does not have."""


@dataclass(frozen=True)
class LayerSequence:
    """A model's layers in order, its parameters by name, and which layers use each parameter."""

    layers: tuple[NamedLayer, ...]
    parameters: dict[str, nn.Parameter]
    users: dict[str, tuple[int, ...]]

    def unit_of(self, name: str) -> str:
        """Return the name of a parameter's unit: its layer's path, or its own name if layers share it."""
        users = self.users[name]
        return name if len(users) > 1 else self.layers[users[0]].path

    @property
    def units(self) -> dict[str, list[str]]:
        """The names of the parameters in each unit (parameters gathered together), by its name."""
        members: dict[str, list[str]] = {}
        for name in self.parameters:
            members.setdefault(self.unit_of(name), []).append(name)
        return members


NO_SHAPE = "has no shape yet: run the model on a batch before, or give its module the number of inputs"


def sequence_of(model: nn.Module) -> LayerSequence:
    """Return `model` as layers: nested `nn.Sequential`s are flattened, any other module is one layer.

    Raises ModelError where it is not a module, or has no layer.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}: give an nn.Module, best an nn.Sequential.")
    layers = tuple(_flatten(model, ""))
    if not layers:
        raise ModelError("the model is an empty nn.Sequential: give it at least one layer.")
    names: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    users: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ModelError(f"{join(layer.path, name)} {NO_SHAPE}.")
            full_name = names.setdefault(id(parameter), join(layer.path, name))
            parameters[full_name] = parameter
            users.setdefault(full_name, []).append(index)
    return LayerSequence(layers, parameters, {name: tuple(indexes) for name, indexes in users.items()})


def sequentials_of(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` and the modules in it whose children are layers, with their paths."""
    if _is_flattened(module):
        yield path, module
        for name, child in module.named_children():
            yield from sequentials_of(child, join(path, name))


def _flatten(module: nn.Module, path: str) -> list[NamedLayer]:
    if not _is_flattened(module):
        return [NamedLayer(path, module)]
    # _modules and not named_children, which leaves out a layer's second occurrence.
    return [
        layer
        for name, child in module._modules.items()
        if child is not None
        for layer in _flatten(child, join(path, name))
    ]


def _is_flattened(module: nn.Module) -> bool:
    """Return whether `module` is an `nn.Sequential` that only calls its children, one after the other."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    kind, methods = type(module), ("forward", "__call__", "__iter__")
    return all(getattr(kind, name) is getattr(nn.Sequential, name) for name in methods)


def private_copy(layers: Sequence[NamedLayer], tensors: Mapping[int, Tensor]) -> list[NamedLayer]:
    """Return copies of `layers` whose tensors are replaced by `tensors`.

    `tensors` holds the replacements, by the `id` of each parameter and buffer; they get the attributes of
    these. What several of `layers` share, their copies share. An `nn.Dropout` becomes a `plait.Dropout`.
    """
    memo: dict[int, object] = dict(tensors)
    for layer in layers:
        memo |= {id(tensor): tensor.detach() for tensor in computed_by_hooks(layer.module)}
        for module in layer.module.modules():
            memo |= {id(one): one for one in (*hook_objects(module), *shared_objects(module))}
            if is_plain_dropout(module):
                memo[id(module)] = from_plain_dropout(module)
    copies = copy.deepcopy([layer.module for layer in layers], memo)
    for layer in layers:
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            copy_attributes(tensor, cast(Tensor, memo[id(tensor)]))
    return [replace(layer, module=module) for layer, module in zip(layers, copies, strict=True)]


def copy_attributes(tensor: Tensor, other: Tensor) -> None:
    """Set on `other` the Python attributes that a user has set on `tensor`, such as `no_weight_decay`."""
    vars(other).update(vars(tensor))


def on_meta(
    sequence: LayerSequence, dtype: torch.dtype | None, shapes: Mapping[str, Sequence[int]]
) -> dict[int, Tensor]:
    """Return meta tensors for the model's parameters, buffers and tensor attributes, by the original's `id`.

    `shapes` are those of the new parameters, by name; `dtype` as for `convert`.
    """
    meta = torch.device("meta")
    found: dict[int, Tensor] = {}
    for name, parameter in sequence.parameters.items():
        empty = convert(parameter.detach(), dtype, meta).new_empty(tuple(shapes[name]))
        found[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for layer in sequence.layers:
        for name, buffer in layer.module.named_buffers():
            found[id(buffer)] = convert(buffer, buffer_dtype(layer.module, name, dtype), meta)
        for module in layer.module.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor):  # a plain attribute, neither parameter nor buffer
                    found[id(value)] = torch.empty_like(value, device=meta)
    return found


def buffer_dtype(layer: nn.Module, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which a layer's buffer is converted where a run has `dtype`; None: it is not.

    A module keeps those of its buffers that its attribute `keeps_dtype` names, such as small corrections that
    add up over many steps.
    """
    owner, _, local = name.rpartition(".")
    return None if local in getattr(layer.get_submodule(owner), "keeps_dtype", ()) else dtype


def without_values(sequence: LayerSequence) -> LayerSequence:
    """Return the sequence with all tensors on the meta device, without references to the model's tensors."""
    shapes = {name: parameter.shape for name, parameter in sequence.parameters.items()}
    meta = on_meta(sequence, None, shapes)
    parameters = {name: cast(nn.Parameter, meta[id(one)]) for name, one in sequence.parameters.items()}
    return replace(sequence, layers=tuple(private_copy(sequence.layers, meta)), parameters=parameters)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a model by name; shared ones by their first name only."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def saved_buffers(layers: Iterable[NamedLayer]) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers in the layers' `state_dict`, with full names; a shared buffer under each name."""
    for layer in layers:
        saved = layer.module.state_dict().keys()
        for name, buffer in layer.module.named_buffers():
            if name in saved:
                yield join(layer.path, name), buffer


def attribute_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the plain attributes of a layer's modules, also in lists and dictionaries."""
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for tensor in tensors_of(value):
                    yield join(path, name), tensor


def own_numbers(module: nn.Module) -> dict[str, int | float]:
    """Return the attributes of `module` itself that are numbers, by name."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def read_attributes(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of `module` and its submodules by dotted name, `MISSING` where there is none."""
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
    return {name: getattr(owner, name.rpartition(".")[2], MISSING) for name, owner in owners.items()}


def set_attributes(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set attributes of `module` and its submodules to copies of `values`; delete those `MISSING`."""
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if value is not MISSING:
            setattr(holder, attribute, value.clone() if isinstance(value, Tensor) else value)
        elif hasattr(holder, attribute):
            delattr(holder, attribute)


def aliases_of(layers: Iterable[NamedLayer]) -> dict[str, str]:
    """Return the first full name of each shared parameter, by each of its other full names."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for layer in layers:
        for name, parameter in layer.module.named_parameters(remove_duplicate=False):
            full = join(layer.path, name)
            known = first.setdefault(id(parameter), full)
            if known != full:
                found[full] = known
    return found


def layer_costs(layers: Sequence[NamedLayer]) -> list[float]:
    """Return the relative cost of each layer: the result of its `cost()`, else its number of matrix elements.

    An element of a matrix is one multiplication a token; an embedding table costs next to nothing, and of
    experts count as many as a token passes through.
    """
    return [_cost(layer.module) for layer in layers]


def _cost(module: nn.Module) -> float:
    own = getattr(module, "cost", None)
    if callable(own):
        return float(own())
    return 1 + active_elements(module)


def bits_of(tensor: Tensor) -> bytes:
    """Return the bytes of `tensor`, copied to the CPU."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@contextmanager
def evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Put every module of `layers` in evaluation mode; restore each module's mode at the end."""
    modules = [module for layer in layers for module in layer.modules()]
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
