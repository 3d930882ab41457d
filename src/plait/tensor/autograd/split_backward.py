"""Protocol of modules whose backward is split: input gradient in action `I`, weight gradients in action `W`.

    class Scale(nn.Module):
        def split_forward(self, x):                          F: the output, and what to save
            return x * self.weight, (x,)

        def forward(self, x):                                without a schedule
            return self.split_forward(x)[0]

        def input_gradient(self, gradient, x):               I
            return gradient * self.weight

        @staticmethod
        def weight_gradients(gradient, x):                   W
            return {"weight": (gradient * x).flatten(0, -2).sum(0)}

`nn.Linear`, `nn.Embedding` and `Conv1D` are split without it: see
`plait.tensor.autograd.deferred_weight_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.autograd.private_torch_functions import apply_function
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue


@runtime_checkable
class SplitBackward(Protocol):
    """Interface of an `nn.Module` with separate input and weight gradients (actions `I` and `W`).

    `parallelize` finds such modules anywhere in a layer; nothing is registered. Each method is called once a
    micro-batch (`split_forward` once more with recomputation), with gradients disabled. Where there
    is no `W`, in plain PyTorch or an evaluation, the module's own `forward` runs. First-order only.
    """

    def split_forward(self, *inputs: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """Action F: return the output, one tensor, and the values to save for the two gradient methods.

        No saved tensor may be a parameter or a view of one, since parameters may be freed before `W`.
        """
        ...

    def input_gradient(self, gradient: Tensor, *saved: Any) -> Tensor | tuple[Tensor | None, ...] | None:
        """Action I: return the gradient of the input, or a tuple for several; None for inputs without one.

        `gradient` is that of the output. Parameters may be read.
        """
        ...

    @staticmethod
    def weight_gradients(gradient: Tensor, *saved: Any) -> Mapping[str, Tensor]:
        """Action W: return the gradient of each parameter that requires one, by its name in the module.

        A static method, because parameters may be freed before `W`.
        """
        ...


def require_static(module: SplitBackward) -> None:
    """Raise ModelError unless `weight_gradients` is a static method, which cannot read freed parameters."""
    if not isinstance(getattr_static(type(module), "weight_gradients"), staticmethod):
        raise ModelError(
            f"{type(module).__name__}.weight_gradients is no static method, but runs when parameters may be "
            "freed: make it one, and let split_forward save what it needs."
        )


def run_split(module: Any, queue: WeightGradientQueue, *inputs: Any) -> Tensor:
    """Return the output of a `SplitBackward` module; its backward queues the weight gradients."""
    parameters = dict(module.named_parameters())
    call = _Call(module, queue, tuple(parameters), len(inputs))
    output: Tensor = apply_function(_SplitModule, call, *inputs, *parameters.values())
    return output


@dataclass(frozen=True)
class _Call:
    """The non-tensor arguments of a `_SplitModule` call: module, queue, parameter names, input count."""

    module: Any
    queue: WeightGradientQueue
    names: tuple[str, ...]
    """Of the parameters."""
    inputs: int
    """The number of inputs."""

    @property
    def kind(self) -> str:
        """The name of the module's class, for messages."""
        return type(self.module).__name__


class _SplitModule(torch.autograd.Function):
    """Autograd function of a `SplitBackward` call. Parameters are inputs, so that a backward always runs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: Any) -> Tensor:
        output, saved = call.module.split_forward(*given[: call.inputs])
        if not isinstance(output, Tensor) or not isinstance(saved, tuple):
            raise ModelError(
                f"{call.kind}.split_forward gave {type(output).__name__} and {type(saved).__name__}: give "
                "the output, one tensor, and a tuple of what its gradients need."
            )
        own = {one.untyped_storage().data_ptr() for one in given[call.inputs :]}
        if any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() in own - {0} for one in saved):
            raise ModelError(
                f"{call.kind}.split_forward saves a parameter, or a view of one, which may be freed before "
                "its weight gradients are computed: clone it, or read it in input_gradient from the module."
            )
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in saved))
        ctx.others = tuple(None if isinstance(one, Tensor) else one for one in saved)
        ctx.call, ctx.trains, ctx.ran = call, given[call.inputs :], False
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        refuse_other_orders(ctx, call.kind)
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        saved = [other if one is None else one.detach() for one, other in pairs]
        wanted = dict(zip(call.names, ctx.trains, strict=True))
        wanted = {name: weight for name, weight in wanted.items() if weight.requires_grad}
        needs = ctx.needs_input_grad[1 : 1 + call.inputs]
        given = call.module.input_gradient(gradient, *saved) if any(needs) else None
        gradients = given if isinstance(given, tuple) else (given, *[None] * (call.inputs - 1))
        if len(gradients) != call.inputs:
            raise ModelError(
                f"{call.kind}.input_gradient gave {len(gradients)} gradients for {call.inputs} inputs: give "
                "one for each, or None."
            )
        if wanted:  # last, so that I is before W also where the queue computes at once
            call.queue.add(lambda: _add(call, wanted, gradient, saved))
        return None, *gradients, *[None] * len(call.names)


@torch.no_grad()
def _add(call: _Call, wanted: Mapping[str, Tensor], gradient: Tensor, saved: list[Any]) -> None:
    """Compute weight gradients and add them to their buffers. Raises ModelError for a wrong name or shape."""
    found = call.module.weight_gradients(gradient, *saved)
    for name, weight in wanted.items():
        if name not in found or found[name].shape != weight.shape:
            got = f"{list(found[name].shape)} for" if name in found else "no gradient of"
            raise ModelError(
                f"{call.kind}.weight_gradients gave {got} the parameter {name!r} {list(weight.shape)}: give "
                "a gradient of that shape under its name in the module."
            )
        call.queue.buffer_of(weight).add_(found[name])


def refuse_other_orders(ctx: Any, name: str) -> None:
    """Raise ModelError for a second backward through an autograd node, or one with `create_graph=True`."""
    # Gradients are enabled inside a backward only under create_graph.
    if ctx.ran or torch.is_grad_enabled():
        raise ModelError(
            f"{name} met a second backward, or one with create_graph: its weight gradient is added once, "
            "when it is due, so retain_graph and create_graph cannot be used inside a layer."
        )
    ctx.ran = True
