"""Mistakes of digits, of the batch, the loss, the backward and the optimizer: no rank is to blame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.engine import Engine
from plait.engine.pipeline.loss_stage import LossStage
from plait.engine.pipeline.stage import Stage
from plait.engine.runner import Runner
from plait.tensor.losses import CrossEntropy
from zoo.computing import (
    ATTENTION,
    LLAMA,
    MLP_PATH,
    SCORES,
    G,
    L,
    _attending,
    _given,
    _instead,
    _of,
    _rounded,
)
from zoo.diagnosed import Mistake
from zoo.losses import _beginning, targets_shifted
from zoo.patching import in_single

# digits


def layer_in_bfloat16() -> Any:
    return _given(lambda before, after: _rounded(torch.bfloat16)(after), MLP_PATH)


def branch_in_half_precision() -> Any:
    return _given(lambda before, after: before + _rounded(torch.float16)(after - before), ATTENTION)


def branch_in_bfloat16() -> Any:
    return _given(lambda before, after: before + _rounded(torch.bfloat16)(after - before), ATTENTION)


def norm_in_bfloat16() -> Any:
    return _instead(
        functional, "layer_norm", lambda call, *rest: _rounded(torch.bfloat16)(call(*rest)), MLP_PATH
    )


def attention_in_single_precision() -> Any:
    return _attending(lambda call, q, k, v, **options: call(*map(in_single, (q, k, v)), **options))


def attention_in_bfloat16() -> Any:
    return _attending(
        lambda call, *tensors, **options: call(*map(_rounded(torch.bfloat16), tensors), **options)
    )


def angles_in_single_precision() -> Any:
    def angles(call: Any, *arguments: Any) -> Any:
        return tuple(map(in_single, call(*arguments)))

    return _instead(LLAMA, "rotary_angles", angles, ATTENTION)


# the batch and the loss


@contextmanager
def tokens_shifted() -> Iterator[None]:
    original = Runner.as_input
    with patch.object(Runner, "as_input", lambda self, tokens: original(self, tokens).roll(1, 1)):
        yield


def targets_one_earlier() -> Any:
    return _beginning(lambda targets, scale: ([part.roll(-1, 1) for part in targets], scale))


def targets_left_out() -> Any:
    """The last target of each row does not count."""

    def without(targets: Any, scale: Any) -> Any:
        targets = [part.clone() for part in targets]
        for part in targets:
            part[:, -1] = -100
        return targets, scale

    return _beginning(without)


def _losing(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
    """The engine's loss becomes what `change` makes of it, the output and the targets."""
    original = LossStage.begin

    class Changed(CrossEntropy):
        def total(self, output: Any, targets: Any) -> Tensor:
            return change(super().total(output, targets), output, targets)

    def begin(self: LossStage, targets: Any, scale: Any) -> None:
        self.loss = Changed()
        original(self, targets, scale)

    return patch.object(LossStage, "begin", begin)


def loss_is_a_mean() -> Any:
    return _losing(lambda total, output, targets: total / targets.numel())


def loss_in_single_precision() -> Any:
    return _losing(lambda total, output, targets: in_single(total))


def loss_of_logits_squared() -> Any:
    """A term that keeps logits small, which the reference does not have."""
    return _losing(lambda total, output, targets: total + 1e-2 * output.logsumexp(-1).square().sum())


# backward, of one rank


def _backward(change: Callable[[Tensor, Tensor], Tensor], layer: str) -> Any:
    """The gradient of a layer's input becomes what `change` makes of it and of its output's gradient."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        given = [g.clone() for g in self.gradients[microbatch] if g is not None]
        original(self, microbatch, number)
        if self.layers[number].path == layer:
            after: Any = self.gradients[microbatch]
            self.gradients[microbatch] = [change(given[0], after[0])]

    return patch.object(Stage, "backward_input", backward_input)


def backward_without_residual() -> Any:
    return _backward(lambda before, after: after - before, MLP_PATH)


def backward_with_residual_twice() -> Any:
    return _backward(lambda before, after: after + before, MLP_PATH)


def backward_of_the_branch_left_out() -> Any:
    """As after a detach."""
    return _backward(lambda before, after: before, MLP_PATH)


def backward_scaled() -> Any:
    return _backward(lambda before, after: after * 3, "head")


def backward_in_single_precision() -> Any:
    return _backward(lambda before, after: in_single(after), ATTENTION)


def backward_in_bfloat16() -> Any:
    return _backward(lambda before, after: _rounded(torch.bfloat16)(after), ATTENTION)


def backward_of_relu_for_gelu() -> Any:
    """A backward by hand that is that of another activation."""

    class Activation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return GELU(x, approximate="tanh")

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (ctx.saved_tensors[0] > 0)

    return patch.object(functional, "gelu", lambda x, approximate: _only_woven(Activation.apply, x))


GELU = functional.gelu


def _only_woven(function: Any, x: Tensor) -> Tensor:
    """In a forward of a stage; the reference has the right one."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_qualname != "EagerLayer.forward":
        frame = frame.f_back
    result: Tensor = GELU(x, approximate="tanh") if frame is None else function(x)
    return result


def _weight(change: Callable[[nn.Parameter, Tensor, Tensor], None], layer: str) -> Any:
    """After a layer's weight work, `change` is given each parameter, its gradient before, what was added."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int, number: int) -> None:
        parameters = list(self.layers[number].module.parameters())
        before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
        original(self, microbatch, number)
        if self.layers[number].path == layer:
            for parameter, old in zip(parameters, before, strict=True):
                change(parameter, old, parameter.grad - old)  # type: ignore[operator]

    return patch.object(Stage, "backward_weight", backward_weight)


def square_weight_gradients_transposed() -> Any:
    def change(parameter: nn.Parameter, before: Tensor, added: Tensor) -> None:
        if added.dim() == 2 and added.shape[0] == added.shape[1]:
            parameter.grad.copy_(before + added.T)  # type: ignore[union-attr]

    return _weight(change, ATTENTION)


def weight_gradients_overwritten() -> Any:
    def change(parameter: nn.Parameter, before: Tensor, added: Tensor) -> None:
        if parameter.dim() == 2:
            parameter.grad.copy_(added)  # type: ignore[union-attr]

    return _weight(change, MLP_PATH)


def weight_gradients_tripled() -> Any:
    def change(parameter: nn.Parameter, before: Tensor, added: Tensor) -> None:
        if parameter.dim() == 2:
            parameter.grad.copy_(before + 3 * added)  # type: ignore[union-attr]

    return _weight(change, MLP_PATH)


# the optimizer


def _stepping(change: Callable[[Any], None]) -> Any:
    """Every engine's parameter groups go through `change`."""
    original = Engine.parameter_groups

    def groups(self: Engine, *arguments: Any, **options: Any) -> Any:
        made = original(self, *arguments, **options)
        for group in made:
            change(group)
        return made

    return patch.object(Engine, "parameter_groups", groups)


def rate_tripled() -> Any:
    return _stepping(lambda group: group.update(lr=3e-3))


def nothing_decays() -> Any:
    return _stepping(lambda group: group.update(weight_decay=0.0))


def everything_decays() -> Any:
    return _stepping(lambda group: group.update(weight_decay=0.1))


def other_epsilon_of_adam() -> Any:
    return _stepping(lambda group: group.update(eps=1e-4))


def other_betas() -> Any:
    return _stepping(lambda group: group.update(betas=(0.8, 0.95)))


TRAINING: tuple[Mistake, ...] = (
    _of(layer_in_bfloat16, G, "bfloat16", "bfloat16"),
    _of(branch_in_half_precision, G, "float16", "float16"),
    _of(branch_in_bfloat16, G, "bfloat16", "bfloat16"),
    _of(norm_in_bfloat16, G, "bfloat16|norm", "bfloat16"),
    _of(attention_in_single_precision, G, "output is given", "float32"),
    _of(attention_in_bfloat16, G, "output|bfloat16", "bfloat16"),
    _of(angles_in_single_precision, L, "float32|" + SCORES, "float32"),
    _of(tokens_shifted, G, "shifted|rows|later", "order"),
    _of(targets_shifted, G, "shifted", "targets", "order", "cut"),
    _of(targets_one_earlier, G, "shifted", "targets", "order", "cut"),
    _of(targets_left_out, G, "the targets", "targets", "cut"),
    _of(loss_is_a_mean, G, "mean|1/16", "factor"),
    _of(loss_in_single_precision, G, "float32", "float32"),
    _of(loss_of_logits_squared, G, "the loss itself", "targets"),
    _of(backward_without_residual, G, "residual connection", "residual"),
    _of(backward_with_residual_twice, G, "residual connection", "residual"),
    _of(backward_of_the_branch_left_out, G, "unchanged", "factor"),
    _of(backward_scaled, G, "3 times", "factor"),
    _of(backward_in_single_precision, G, "float32", "float32"),
    _of(backward_in_bfloat16, G, "bfloat16", "bfloat16"),
    _of(backward_of_relu_for_gelu, G, "backward"),
    _of(square_weight_gradients_transposed, G, "transposed", "order"),
    _of(weight_gradients_overwritten, G, "only|overwritten|micro-batches before"),
    _of(weight_gradients_tripled, G, "3 times", "factor"),
    _of(rate_tripled, G, "the update is 3 times", "factor", "cut"),
    _of(nothing_decays, G, "weight decay", "cut"),
    _of(everything_decays, G, "weight decay", "cut"),
    _of(other_epsilon_of_adam, G, "setting", "cut"),
    _of(other_betas, G, "setting", "factor"),
)
