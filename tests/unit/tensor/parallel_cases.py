"""Parallel layers on every rank, against the full layers that they were cut from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.plan.layout import Layout, assemble, divide
from plait.ranks import Group, Mesh
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear

WIDTH = 12
"""Of linears; divides by 2, 3 and 4."""
Defect = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Trial:
    """A full layer, how a rank cuts it, its input and the gradient of its output (both whole)."""

    full: nn.Module
    cut: Callable[[Any, Group], nn.Module]
    given: Tensor
    gradient: Tensor
    parts_in: bool = False
    """Whether a rank is given its part of the input's last dim; else all of it."""
    parts_out: bool = False
    """Whether a rank gives its part of the output's last dim."""


@dataclass(frozen=True)
class Answer:
    output: Tensor
    input_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    layouts: dict[str, Layout]


def part(whole: Tensor, group: Group) -> Tensor:
    """This rank's part of the last dim: a view, so not contiguous where there are several dims."""
    own = divide(whole.shape[-1], group.size)[group.index]
    return whole.narrow(-1, own.start, len(own))


def run_plain(layer: nn.Module, given: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and gradient of the input."""
    leaf = given.detach().requires_grad_(given.is_floating_point())
    output = layer(leaf)
    output.backward(gradient)
    return output.detach(), leaf.grad


def layouts_by_name(layer: nn.Module) -> Iterator[tuple[str, Layout]]:
    for path, module in layer.named_modules():
        for name, layout in getattr(module, "layouts", {}).items():
            yield f"{path}.{name}" if path else name, layout


def defer(layer: nn.Module) -> WeightGradientQueue:
    """Let the parallel layers in `layer` leave their weight work with a queue; their gradients are zero."""
    queue = WeightGradientQueue()
    for module in layer.modules():
        if hasattr(module, "queue"):
            module.queue = queue
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return queue


def answers_of_a_rank(
    trials: Sequence[Trial], ranks: int, deferred: bool, defect: Defect, twice: bool
) -> list[Answer]:
    group = Mesh(tp=ranks).group("tp")
    answers = []
    with defect():
        for trial in trials:
            layer = trial.cut(trial.full, group)
            queue = defer(layer) if deferred else None
            given = part(trial.given, group) if trial.parts_in else trial.given
            gradient = part(trial.gradient, group) if trial.parts_out else trial.gradient
            for _ in range(2 if twice else 1):
                output, input_gradient = run_plain(layer, given, gradient)
            if queue is not None:
                queue.run()
            gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
            answers.append(Answer(output, input_gradient, gradients, dict(layouts_by_name(layer))))
    return answers


def check(
    rank_pool: Any,
    ranks: int,
    *trials: Trial,
    deferred: bool = False,
    defect: Defect = nullcontext,
    twice: bool = False,
) -> None:
    """Output, gradient of the input and of every parameter are those of the full layers."""
    found = rank_pool.run(answers_of_a_rank, trials, ranks, deferred, defect, twice, ranks=ranks)
    for number, trial in enumerate(trials):
        answers = [answers[number] for answers in found]
        full = copy.deepcopy(trial.full)
        for _ in range(2 if twice else 1):
            output, input_gradient = run_plain(full, trial.given, trial.gradient)
        assert_close(whole([answer.output for answer in answers], trial.parts_out), output, "output")
        if input_gradient is not None:
            got = whole([answer.input_gradient for answer in answers], trial.parts_in)
            assert_close(got, input_gradient, "gradient of the input")
        for name, parameter in full.named_parameters():
            parts = [answer.gradients[name] for answer in answers]
            if parameter.grad is None:
                assert parts == [None] * ranks, f"{name} is frozen"
            else:
                assert None not in parts, f"{name} has no gradient"
                got = assemble(parts, answers[0].layouts[name])
                assert_close(got, parameter.grad, f"gradient of {name}")


def whole(parts: Sequence[Tensor], cut: bool) -> Tensor:
    if cut:
        return torch.cat(list(parts), dim=-1)
    assert all(torch.equal(one, parts[0]) for one in parts), "the ranks differ"
    return parts[0]


def assert_close(got: Tensor, wanted: Tensor, name: str) -> None:
    assert got.shape == wanted.shape, name
    assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max(), name


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def linear(inputs: int = WIDTH, outputs: int = WIDTH, *, bias: bool = True, frozen: str = "") -> nn.Linear:
    full = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(full.named_parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number + 1)).requires_grad_(name != frozen)
    return full


def full_block(outputs: int = 8, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(linear(WIDTH, 24, bias=bias), nn.GELU(), linear(24, outputs, bias=bias))


def cut_block(full: nn.Sequential, group: Group) -> nn.Sequential:
    return nn.Sequential(
        ColumnParallelLinear.of(full[0], group), nn.GELU(), RowParallelLinear.of(full[2], group)
    )
