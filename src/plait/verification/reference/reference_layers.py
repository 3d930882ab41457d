"""A reference run's own layers: copies with parameters of their own, and errors of running them.

Layers and the loss have to depend on their arguments alone, and on no tensor kept in a global. On one rank
that may work. Where layers run on several ranks, for several micro-batches in turn, the tensor is that of
another micro-batch, or of a trial run, or is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from plait.errors import ModelError, PlaitError
from plait.models.initial_values import ModuleReset, initial_value
from plait.models.layers.layer_sequence import LayerSequence, buffer_dtype, private_copy
from plait.models.layers.stateful_layer_check import other_leaf
from plait.tensor.dtypes import convert
from plait.tensor.losses import Loss
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.verification.expected_dtypes import NumberFormats
from plait.verification.reference.start_values import ValueChange

PASS_IT_ON = (
    "as an auxiliary loss that a layer keeps in a global or in an attribute: let the layers pass it on, "
    "beside their output"
)
SAME = 64.0
"""Difference of two totals of the same loss, in machine epsilons, at most."""


@contextmanager
def input_replaced(layer: nn.Module, name: str | None, replace: Callable[[Value], Value]) -> Iterator[None]:
    """Context: apply `replace` to the input of a layer's module `name`; for None do nothing."""
    if name is None:
        yield
        return
    module = layer.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, given: tuple(map(replace, given)))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def failure_named(what: str) -> Iterator[None]:
    """Context: raise a ModelError for any error, saying that `what` fails even on a single device."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        if "meta" in message:
            message = f"{message} (it meets a tensor that a trial run of a layer has left, {PASS_IT_ON})"
        mixed = " (it keeps tensors of another dtype: try mode native)" if "dtype" in message else ""
        raise ModelError(
            f"{what} fails on a single device, {type(error).__name__}: {message}{mixed}"
        ) from error


@contextmanager
def random_refused(path: str) -> Iterator[None]:
    """Context: raise ModelError if a layer draws random numbers, which differ between ranks and runs."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise ModelError(
            f"{path or 'the model'} draws random numbers, which depend on the layout and on other draws: "
            "replace them by constants, and set dropout to 0, to verify the rest."
        )


def require_no_hidden_input(what: str, results: Value, given: Iterable[Node], own: Iterable[Tensor]) -> None:
    """Raise ModelError if `results` depend on a trainable tensor that is not one of the layer's own.

    `given`: the nodes of the arguments, beyond which the graph is not followed.
    """
    leaf = other_leaf(tensors_of(results), own, given)
    if leaf is not None:
        raise ModelError(
            f"{what} depends on a tensor {list(leaf.shape)} that it is not given and that is no "
            f"parameter of its own, {PASS_IT_ON}."
        )


def require_function_of_output(loss: Loss, total: Tensor, output: Value, targets: Value) -> None:
    """Raise ModelError unless `total`, just computed by the loss, depends on `output` and `targets` alone."""
    with torch.enable_grad():
        copies = map_tensors(lambda one: one.detach().clone().requires_grad_(one.requires_grad), output)
        try:
            again = loss.total(copies, targets)
        except Exception as error:  # of a user's loss
            raise ModelError(
                f"the loss, called again with the same output and targets, fails with "
                f"{type(error).__name__}: it depends on something else, {PASS_IT_ON}, and add it in the loss."
            ) from error
    require_no_hidden_input("the loss", again, (), (*tensors_of(copies), *_parameters_of(loss)))
    again = again.detach()
    apart, size = float((again - total).abs()), float(total.abs())
    if apart > SAME * torch.finfo(total.dtype).eps * size:
        raise ModelError(
            f"the loss is {float(total):.6g}, and called again with the same output and targets "
            f"{float(again):.6g}: it depends on something else, {PASS_IT_ON}, and add it in the loss."
        )


def _parameters_of(loss: Loss) -> Iterator[Tensor]:
    """Yield the parameters of a loss, and of the modules that are its attributes."""
    for part in (loss, *getattr(loss, "__dict__", {}).values()):
        if isinstance(part, nn.Module):
            yield from part.parameters()


def require_values(what: str, tensor: Tensor) -> None:
    """Raise ModelError for a tensor on the meta device, which has no values."""
    if tensor.is_meta:
        raise ModelError(
            f"{what} is computed from a tensor on the meta device, left by a trial run of a layer, "
            f"{PASS_IT_ON}."
        )


BuiltLayers = tuple[
    dict[str, nn.Parameter], dict[str, Tensor], list[NamedLayer], list[dict[str, nn.Parameter]]
]


def build_layers(
    sequence: LayerSequence,
    seed: int,
    change: ValueChange,
    formats: NumberFormats,
    device: torch.device,
    *,
    always_copy: bool,
) -> BuiltLayers:
    """Return a reference run's parameters, their copies in compute dtype, its layers, and leaf tensors.

    Copies are by name, leaf tensors (aliases) by layer and name. Aliases are a layer's own leaf tensors for
    its parameters, with gradients of their own. Layers use the parameters' own memory where that has their
    compute dtype, unless `always_copy`.
    """
    names = {id(parameter): name for name, parameter in sequence.parameters.items()}
    parameters: dict[str, nn.Parameter] = {}
    copies: dict[str, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    layers, aliases_of_layers, latest = [], [], ModuleReset()
    for layer in sequence.layers:
        tensors: dict[int, Tensor] = {}
        aliases: dict[str, nn.Parameter] = {}
        for local, parameter in layer.module.named_parameters():
            name = names[id(parameter)]
            compute, master = formats.compute_of(parameter), formats.master_of(parameter)
            if name not in parameters:
                value = change(name, initial_value(layer.module, layer.path, local, seed, latest))
                parameters[name] = nn.Parameter(convert(value, master, device), parameter.requires_grad)
                if always_copy or compute != master:
                    copies[name] = convert(parameters[name].detach(), compute, device)
            alias = nn.Parameter(copies.get(name, parameters[name].data), parameter.requires_grad)
            tensors[id(parameter)] = aliases[name] = alias
        for local, buffer in layer.module.named_buffers():
            if id(buffer) not in buffers:
                value = initial_value(layer.module, layer.path, local, seed, latest)
                buffers[id(buffer)] = convert(
                    value, buffer_dtype(layer.module, local, formats.compute), device
                )
            tensors[id(buffer)] = buffers[id(buffer)]
        layers += private_copy([layer], tensors)
        aliases_of_layers.append({name: alias for name, alias in aliases.items() if alias.requires_grad})
    return parameters, copies, layers, aliases_of_layers
