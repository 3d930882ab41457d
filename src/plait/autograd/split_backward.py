"""The split of backward for a module of one's own: its input's gradient in `I`, its weights' in `W`.

    class Scale(nn.Module):
        def split_forward(self, x):                          F: the output, and what the gradients need
            return x * self.weight, (x,)

        def forward(self, x):                                in plain PyTorch, and for shapes
            return self.split_forward(x)[0]

        def input_gradient(self, gradient, x):               I
            return gradient * self.weight

        @staticmethod
        def weight_gradients(gradient, x):                   W
            return {"weight": (gradient * x).flatten(0, -2).sum(0)}

`nn.Linear`, `nn.Embedding` and `Conv1D` need nothing of the kind: see `plait.autograd.deferred`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from plait.autograd.weight_queue import WeightGradientQueue
from plait.errors import ModelError


@runtime_checkable
class SplitBackward(Protocol):
    """What an `nn.Module` has whose weight gradients are left to `W`, as those of `nn.Linear` are.

    `parallelize` finds such modules anywhere in a layer; nothing is registered. Each method is called once a
    micro-batch (`split_forward` once more with recomputation), without gradients being recorded. Where there
    is no `W`, in plain PyTorch or an evaluation, the module's own `forward` runs. First-order only.
    """

    def split_forward(self, *inputs: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """F: give the output, one tensor, and what the two methods below are given of this call.

        No tensor among the latter may be a parameter, or a view of one: `W` may come when it is gone.
        """
        ...

    def input_gradient(self, gradient: Tensor, *saved: Any) -> Tensor | tuple[Tensor | None, ...] | None:
        """I: give the gradient of the input, or a tuple of those of all inputs; None where there is none.

        `gradient` is that of the output. Parameters are there.
        """
        ...

    @staticmethod
    def weight_gradients(gradient: Tensor, *saved: Any) -> Mapping[str, Tensor]:
        """W: give the gradient of each parameter that trains, by its name in the module.

        A static method, because parameters may be gone by then: what it needs has to be saved.
        """
        ...


def require_static(module: SplitBackward) -> None:
    """ModelError where `weight_gradients` is no static method, and so could read parameters that are gone."""
    if not isinstance(getattr_static(type(module), "weight_gradients"), staticmethod):
        raise ModelError(
            f"{type(module).__name__}.weight_gradients is no static method, but runs when parameters may be "
            "gone: make it one, and let split_forward save what it needs."
        )


def run_split(module: Any, queue: WeightGradientQueue, *inputs: Any) -> Tensor:
    """The output of a `SplitBackward` module, whose weight work is left with `queue`."""
    parameters = dict(module.named_parameters())
    call = _Call(module, queue, tuple(parameters), len(inputs))
    output: Tensor = _Split.apply(call, *inputs, *parameters.values())  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class _Call:
    """One call of a module."""

    module: Any
    queue: WeightGradientQueue
    names: tuple[str, ...]
    """Of its parameters."""
    inputs: int

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


class _Split(torch.autograd.Function):
    """Parameters are inputs as well, so that there is a backward where no other input has a gradient."""

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
                f"{call.kind}.split_forward saves a parameter, or a view of one, which may be gone when its "
                "weight gradients are due: clone it, or read it in input_gradient from the module."
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
        if wanted:
            call.queue.add(lambda: _add(call, wanted, gradient, saved))
        needs = ctx.needs_input_grad[1 : 1 + call.inputs]
        given = call.module.input_gradient(gradient, *saved) if any(needs) else None
        gradients = given if isinstance(given, tuple) else (given, *[None] * (call.inputs - 1))
        if len(gradients) != call.inputs:
            raise ModelError(
                f"{call.kind}.input_gradient gave {len(gradients)} gradients for {call.inputs} inputs: give "
                "one for each, or None."
            )
        return None, *gradients, *[None] * len(call.names)


def _add(call: _Call, wanted: Mapping[str, Tensor], gradient: Tensor, saved: list[Any]) -> None:
    """Add what `W` gives to the gradients of the parameters. ModelError where it does not fit them."""
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
    """ModelError for a second backward through what `ctx` is of, and for a backward of its backward."""
    # Gradients are enabled inside a backward only when it was asked to make a graph of itself.
    if ctx.ran or torch.is_grad_enabled():
        raise ModelError(
            f"{name} met a second backward, or one with create_graph: its weight gradient is added once, "
            "when it is due, so retain_graph and create_graph cannot be used inside a layer."
        )
    ctx.ran = True
