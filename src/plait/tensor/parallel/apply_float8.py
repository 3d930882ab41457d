"""Linears and experts that multiply in float8, and the ranks between which their operands are divided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.plan.rules import join
from plait.ranks.group import Group, alone
from plait.tensor.autograd.deferred_weight_gradients import bind_forward, is_transposed_linear
from plait.tensor.autograd.float8_linear import float8_linear
from plait.tensor.autograd.float8_operands import DividedDims, Groups, LinearCasts, find_factors
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.expert_casts import ExpertCasts, MatrixCasts
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.float8.recipes import Recipe
from plait.tensor.named_layer import NamedLayer
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear

CASTS = "casts"
"""Attribute of a linear that multiplies in float8: its `LinearCasts`."""
WEIGHT_SCALE = "weight_scale"
"""Attribute of such a linear: the scale of a weight that is in float8 already; None: the weight is cast."""
WEIGHT_FACTOR = "weight_factor"
"""Attribute of such a linear whose weight is cast in graphs: the factor of the cast, found once a step."""
FACTOR_FOR_INPUT = "weight_factor_for_input"
"""Likewise for the input gradient; the same tensor where the recipe casts the weight once."""


@dataclass(frozen=True)
class Float8Layers:
    """Makes linears and experts of layers multiply in float8."""

    recipe: Recipe
    names: Collection[str]
    """The paths of the linears in the model, and of experts."""
    tp: Group
    cp: Group
    etp: Group = field(default_factory=lambda: alone("etp"))
    compute: torch.dtype | None = None
    """The dtype of parameters in layers; None: that of each."""
    compiled: bool = False
    """Whether layers run as graphs, which are given the factors of weights."""
    keeps_experts: bool = False
    """Whether the matrices of experts are cast once a step."""

    def apply(
        self, layer: NamedLayer, queue: WeightGradientQueue, scales: Mapping[int, Tensor], *, on_parts: bool
    ) -> None:
        """Make the linears and experts of `layer` whose names are in `names` multiply in float8.

        To be called after the rules of tensor parallelism were applied. `scales`: those of weights that are
        in float8 already, by the id of the parameter. `on_parts`: whether the layer runs on parts of the
        sequence, so that linears outside of its regions see a part of the tokens.
        """
        for name, experts in experts_in(layer.module):
            if join(layer.path, name) in self.names and experts.casts is None:
                experts.casts = ExpertCasts.over(self.etp, keeps_weights=self.keeps_experts)
        for name, module in layer.module.named_modules(remove_duplicate=False):
            if join(layer.path, name) in self.names and getattr(module, CASTS, None) is None:
                # A buffer, so that graphs of equal layers take it as an argument.
                module.register_buffer(WEIGHT_SCALE, scales.get(id(module.weight)), persistent=False)
                self._apply(module, queue, on_parts=on_parts)
                module.casts.compute = self.compute
                if self.compiled and module.weight_scale is None:
                    _register_factors(module)
        if any(casts_in(layer.module)):
            for module in layer.module.modules():
                _without_fast_path(module)

    def _apply(self, module: Any, queue: WeightGradientQueue, *, on_parts: bool) -> None:
        tokens, own = _of_several(self.cp), _of_several(self.tp)
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            is_row = isinstance(module, RowParallelLinear)
            dims = DividedDims(tokens, own if is_row else (), () if is_row else own)
            module.casts = LinearCasts(self.recipe, dims)
            module.boundary.inputs = queue.inputs
            return
        dims = DividedDims((*tokens, *own) if on_parts else tokens)
        setattr(module, CASTS, LinearCasts(self.recipe, dims))
        queue.products.add(id(module.weight))
        bind_forward(module, partial(_run, module, queue, is_transposed_linear(module)))


def _register_factors(linear: Any) -> None:
    """Give a linear buffers for the factors of its weight."""
    casts: LinearCasts = linear.casts
    rows, columns = _by_rows(linear).shape
    shapes = {casts.key_of_weight: (rows, 1), casts.key_of_weight_for_input: (1, columns)}
    for name, key in (
        (WEIGHT_FACTOR, casts.key_of_weight),
        (FACTOR_FOR_INPUT, casts.key_of_weight_for_input),
    ):
        if key not in casts.buffers:
            shape = shapes[key] if key[0].per == "row" else ()
            casts.buffers[key] = torch.ones(shape, device=linear.weight.device)
        linear.register_buffer(name, casts.buffers[key], persistent=False)


def _by_rows(linear: Any) -> Tensor:
    """Return the weight of a linear as `[outputs, inputs]`, without a graph."""
    is_transposed = getattr(linear, "transposed", False) or is_transposed_linear(linear)
    weight: Tensor = linear.weight.detach()
    return weight.t() if is_transposed else weight


def find_weight_factors(linears: Iterable[Any], *, learns: bool) -> None:
    """Compute the factors that cast a layer's weights to float8, unless this step has them already.

    `learns`: whether input gradients are computed. Communication: one reduction of largest values over each
    set of ranks with parts of some weights, once a step.
    """
    cast = (one for one in linears if one.weight_scale is None)
    find_factors([found for one in cast for found in one.casts.factors_to_find(_by_rows(one), learns=learns)])


def float8_linears_in(layer: nn.Module) -> list[Any]:
    """Return the linears in `layer` that multiply in float8."""
    return [one for one in layer.modules() if isinstance(getattr(one, CASTS, None), LinearCasts)]


def casts_in(layer: nn.Module) -> list[LinearCasts | MatrixCasts]:
    """Return the casts of the linears in `layer` that multiply in float8, and of its experts' matrices."""
    return [one for module in layer.modules() for one in casts_of(module)]


def casts_of(module: nn.Module) -> Sequence[LinearCasts | MatrixCasts]:
    """Return the casts of `module` itself: one of a float8 linear, two of experts, else none."""
    casts = getattr(module, CASTS, None)
    if isinstance(casts, ExpertCasts):
        return casts.gate_up, casts.down
    return () if casts is None else (casts,)


def _without_fast_path(module: nn.Module) -> None:
    """Make torch's encoder layer call its linears in evaluation, too, instead of its fused kernel."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # what its forward asks for the kernel's activation


def _run(module: Any, queue: WeightGradientQueue, is_transposed: bool, input: Tensor) -> Tensor:
    return float8_linear(module, input, queue, is_transposed=is_transposed)


def _of_several(group: Group) -> Groups:
    return (group,) if group.size > 1 else ()
