"""Validation of a model before it runs: refuses what copies of its layers would lose or change.

The layers of a rank are copies, whose parameters are new memory. Modules are copied with their hooks and
attributes, parameters and buffers with their attributes. What cannot be copied is refused, by name: hooks on
parameters, their gradients, classes of their own; hooks and tensors of an `nn.Sequential`, whose layers run
one by one; tensors that are trained without being parameters; and what a `state_dict` has beside parameters
and buffers. Of hooks that are registered later, which copies do not call, `LateHooks` warns.

Refused are also modules whose results would depend on the layout, and compiled ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from plait.errors import ModelError, PlanError
from plait.models.layers.layer_sequence import (
    NO_SHAPE,
    LayerSequence,
    attribute_tensors,
    sequence_of,
    sequentials_of,
)
from plait.plan.rules import join
from plait.ranks.gradient_hook_detection import first_gradient_hook
from plait.tensor.autograd.regathered_activations import version_of
from plait.tensor.dropout import is_plain_dropout
from plait.tensor.find_module_hooks import HOOKS, call_hooks, computed_by_hooks, weight_utility

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
TRACKING_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WHY = "plait keeps weight gradients for later, which compiled code hides, so give it as it was before"


def refuse_lost_settings(model: nn.Module, loss: object) -> None:
    """Raise ModelError for a setting of `model`, such as a hook, that copies of its layers would lose.

    Raises PlanError for a loss with parameters that require a gradient.
    """
    sequence = sequence_of(model)
    _refuse_trained_loss(loss)
    for path, container in sequentials_of(model):
        _refuse_on_sequential(container, path)
    for name, parameter in sequence.parameters.items():
        _refuse(name, _lost_of_parameter(parameter))
    for layer in sequence.layers:
        for name, module in layer.module.named_modules():
            if isinstance(module, WRAPPERS):
                reason = f"is a {type(module).__name__}, which sums gradients by itself: give its .module"
                _refuse(join(layer.path, name) or "the model", reason)
        for name, buffer in layer.module.named_buffers():
            _refuse(join(layer.path, name), _lost_of_buffer(buffer))
        _refuse_attributes(layer.module, layer.path)
    _refuse_other_state(model, sequence)


def _refuse_trained_loss(loss: object) -> None:
    """Raise PlanError for a loss with parameters that require a gradient: an engine trains layers only."""
    for name, module in _modules_of_loss(loss):
        for local, parameter in module.named_parameters():
            if parameter.requires_grad:
                raise PlanError(
                    f"{join(name, local)}, a parameter of the loss {type(loss).__name__}, requires a "
                    "gradient, but an engine trains the parameters of layers only: put it into the last "
                    "layer, or set its requires_grad to False."
                )


def _modules_of_loss(loss: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield the loss, and what it holds, where it is a module, by the name in the loss."""
    for name, held in [("", loss), *getattr(loss, "__dict__", {}).items()]:
        if isinstance(held, nn.Module):
            yield name, held


def buffers_of_loss(loss: object) -> dict[str, Tensor]:
    """Return the buffers of a loss that is a module, or holds some, by name."""
    named = ((name, module.named_buffers()) for name, module in _modules_of_loss(loss))
    return {join(name, local): buffer for name, buffers in named for local, buffer in buffers}


@contextmanager
def refusing_changed_buffers(loss: object) -> Iterator[None]:
    """Context that raises ModelError if a run of the loss in training mode changes a buffer."""
    before = {
        name: (buffer, version_of(buffer), buffer.clone()) for name, buffer in buffers_of_loss(loss).items()
    }
    yield
    for name, buffer in buffers_of_loss(loss).items():
        held, version, value = before.get(name, (None, 0, buffer))
        if buffer.is_meta or (held is buffer and version_of(buffer) == version):
            continue
        if held is not None and buffer.shape == value.shape and torch.equal(buffer.to(value), value):
            continue
        raise ModelError(
            f"{name}, a buffer of the loss {type(loss).__name__}, is set in training: its value "
            "would depend on the rank and on how the batch is cut, so compute it outside of the loss, from "
            "all rows."
        )


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ModelError(f"{name} {reason}.")


def _refuse_on_sequential(container: nn.Module, path: str) -> None:
    place = f"{path or 'the model'} ({type(container).__name__})"
    for register, _ in call_hooks(container):
        raise ModelError(
            f"{place} has a hook of {register}, but plait runs the layers of an nn.Sequential by themselves "
            "and would not call it: register it on one of them, or put the nn.Sequential into a module of "
            "your own, which is one layer."
        )
    for name, _ in (*container.named_parameters(recurse=False), *container.named_buffers(recurse=False)):
        raise ModelError(
            f"{join(path, name)} is a tensor of {place} itself, which runs its layers and does nothing else: "
            "put it into the layer that uses it."
        )


def _lost_of_parameter(parameter: nn.Parameter) -> str | None:
    if isinstance(parameter, UninitializedParameter):
        return NO_SHAPE
    if type(parameter) is not nn.Parameter:
        return (
            f"is a {type(parameter).__name__}, but each rank has a plain nn.Parameter in its place, which "
            "would not behave like it: give an nn.Parameter"
        )
    hook = first_gradient_hook({"": parameter})
    if hook is not None:
        return (
            f"has a hook of {hook[1]}, which would not be called with the whole gradient: change gradients "
            "between forward_backward and optimizer.step(), as in engine.named_parameters()"
        )
    if parameter.grad is not None and (parameter.grad.is_meta or bool(parameter.grad.any())):
        return "has a gradient already, to which plait would not add: call zero_grad() on the model before"
    return None


def _lost_of_buffer(buffer: Tensor) -> str | None:
    if buffer.requires_grad:
        return "is a buffer that requires a gradient, which plait would not compute: register a parameter"
    if type(buffer) not in (Tensor, nn.Parameter):
        return (
            f"is a {type(buffer).__name__}, but each rank has a plain tensor in its place, which would not "
            "behave like it: give a torch.Tensor"
        )
    return None


def _refuse_attributes(layer: nn.Module, path: str) -> None:
    """Raise ModelError for a plain attribute with a tensor that requires a gradient or is on meta."""
    own = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *computed_by_hooks(layer))}
    for name, tensor in attribute_tensors(layer):
        if id(tensor) in own:
            continue
        place = f"{join(path, name)} is a tensor {list(tensor.shape)} that is no parameter"
        if tensor.requires_grad:
            raise ModelError(
                f"{place} of its layer but requires a gradient, which plait would not compute: register it "
                "as a parameter, compute it in forward, or detach it."
            )
        utilities = (weight_utility(one) for one in layer.modules())
        if tensor.is_meta and (utility := next(filter(None, utilities), None)):
            raise ModelError(
                f"{join(path, name)} is computed by {utility}, and is on the meta device, where nothing "
                "draws the values that it is computed from: build the model with real values."
            )
        if tensor.is_meta:
            raise ModelError(
                f"{place} or buffer, and is on the meta device, where nothing gives it a value: register it "
                "as a buffer with an initial value, or build the model with real values."
            )


def _refuse_other_state(model: nn.Module, sequence: LayerSequence) -> None:
    """Raise ModelError where `model.state_dict()` is not the model's parameters and persistent buffers."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held.update(model.named_buffers(remove_duplicate=False))
    saved = model.state_dict()
    for name, value in saved.items():
        if name not in held or not _is_same(value, held[name]):
            _refuse(
                f"model.state_dict() has {'another value of' if name in held else 'the entry'} {name}", _STATE
            )
    for name in sequence.parameters:
        if name not in saved:
            _refuse(f"model.state_dict() has no entry of {name}", _STATE)


_STATE = (
    "by a hook or get_extra_state(), which plait would neither call nor save: keep it outside of the model"
)


def _is_same(value: object, tensor: Tensor) -> bool:
    """Return whether an entry of a state dict is the tensor itself, detached."""
    if not isinstance(value, Tensor) or value.shape != tensor.shape:
        return False
    return tensor.layout != torch.strided or value.untyped_storage() is tensor.untyped_storage()


def refuse_layout_dependence(sequence: LayerSequence) -> None:
    """Raise ModelError for the first module whose result would differ between one and several ranks."""
    for layer in sequence.layers:
        for name, module in layer.module.named_modules():
            reason = _layout_dependence(module)
            if reason is not None:
                place = join(layer.path, name)
                raise ModelError(f"{place} ({type(module).__name__}) {reason}.")


def _layout_dependence(module: nn.Module) -> str | None:
    if module.training and _drop_probability(module):
        return (
            f"drops with p = {_drop_probability(module)}: its random numbers would depend on the layout, "
            "so set p to 0, and use plait.Dropout, or call eval() on it"
        )
    if module.training and isinstance(module, BATCH_NORMS):
        return (
            "normalises over the rows it is shown: its statistics would depend on how the batch is cut, "
            "so use a norm over features or call eval() on it"
        )
    if module.training and isinstance(module, TRACKING_NORMS) and module.track_running_stats:
        return (
            "keeps running statistics: they would depend on how the batch is cut, so set "
            "track_running_stats to False or call eval() on it"
        )
    if module.training and isinstance(module, nn.RReLU):
        return "draws random slopes, which would depend on the layout, so use LeakyReLU or call eval() on it"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return (
            f"changes its weight in the forward (max_norm = {module.max_norm}): data-parallel ranks would "
            "drift apart, so set max_norm to None"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        return (
            "scales gradients by how often a token stands in a micro-batch: they would depend on how the "
            "batch is cut, so set scale_grad_by_freq to False"
        )
    return None


def _drop_probability(module: nn.Module) -> float:
    if isinstance(module, DROPPING) and not is_plain_dropout(module):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout)
    return 0.0


def refuse_compiled_modules(model: nn.Module, path: str = "") -> None:
    """Raise ModelError for the first module of `model`, containers included, that runs compiled code.

    `path` is that of the model, for the message. A compiled function that a forward finds elsewhere, such as
    among the globals of its file, is not found.
    """
    for name, module in model.named_modules():
        place = f"{join(path, name) or 'the model'} ({type(module).__name__})"
        if _is_compiled_module(module):
            raise ModelError(f"{place} was given to torch.compile: {_WHY}.")
        for method in compiled_functions(module):
            raise ModelError(f"{method} of {place} was given to torch.compile: {_WHY}.")


def refuse_compiled_loss(loss: object) -> None:
    """Raise PlanError for a loss that runs compiled code, ModelError if one of its modules does."""
    for method in compiled_functions(loss):
        raise PlanError(f"{method} of the loss {type(loss).__name__} was given to torch.compile: {_WHY}.")
    for name, module in _modules_of_loss(loss):
        refuse_compiled_modules(module, name or "the loss")


def compiled_functions(owner: object) -> Iterator[str]:
    """Yield the names of the compiled methods and attributes of an object."""
    found: dict[str, object] = {}
    for base in reversed(type(owner).__mro__):  # overridden methods do not run
        if base not in (nn.Module, object):
            found |= vars(base)
    for name, value in (found | getattr(owner, "__dict__", {})).items():
        if _is_compiled_function(value):
            yield name


def _is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is a result of `torch.compile`, or was compiled in place by `module.compile()`.

    Private to torch: the class `OptimizedModule`, and the attribute `_compiled_call_impl`.
    """
    wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled_function(value: object) -> bool:
    """Return whether a function is a result of `torch.compile`.

    Private to torch: such a function has `_torchdynamo_orig_callable`; one that is never compiled
    (`torch.compiler.disable`) has it too, and `_torchdynamo_disable`.
    """
    held = getattr(value, "__dict__", {})
    return "_torchdynamo_orig_callable" in held and not held.get("_torchdynamo_disable", False)


class LateHooks:
    """Warns once about hooks that were registered on a model or its parameters after `parallelize`."""

    def __init__(self, model: nn.Module) -> None:
        """Count the hooks on calls; parameters have none then. Keeps neither modules nor parameters alive."""
        self._hooks: list[tuple[str, str, Sized]] = [
            (name, register, getattr(module, kind))
            for name, module in model.named_modules()
            for kind, register in HOOKS.items()
        ]
        self._before = self._numbers()
        self._parameters = [(name, ref(parameter)) for name, parameter in model.named_parameters()]

    def warn(self) -> None:
        """Warn of a hook registered since `parallelize`, if there is one; only in the first such call."""
        if not self._hooks or (late := self._first()) is None:
            return
        self._hooks, self._parameters = [], []
        warnings.warn(
            f"a hook was registered or removed by {late} of the model after parallelize, whose copies the "
            "ranks run: they go on with the hooks that there were; register hooks before.",
            stacklevel=3,
        )

    def _numbers(self) -> list[int]:
        return [len(hooks) for _, _, hooks in self._hooks]

    def _first(self) -> str | None:
        now = self._numbers()
        if now != self._before:
            at = next(at for at, number in enumerate(now) if number != self._before[at])
            name, register, _ = self._hooks[at]
            return f"{name}.{register}" if name else register
        alive: dict[str, Tensor] = {
            name: one for name, kept in self._parameters if (one := kept()) is not None
        }
        found = first_gradient_hook(alive)
        return None if found is None else ".".join(found)
