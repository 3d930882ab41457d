"""Linears and experts that multiply in float8, and the ranks between which their operands are divided."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.plan.rules import join
from plait.ranks.group import Group, alone
from plait.tensor.autograd.deferred_weight_gradients import bind_forward, is_transposed_linear
from plait.tensor.autograd.float8_linear import float8_linear
from plait.tensor.autograd.float8_operands import DividedDims, Groups, LinearCasts
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.experts.expert_casts import ExpertCasts, MatrixCasts
from plait.tensor.experts.expert_layouts import experts_in
from plait.tensor.float8.recipes import Recipe
from plait.tensor.layer_values import NamedLayer
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear

CASTS = "casts"
"""Attribute of a linear that multiplies in float8: its `LinearCasts`."""
WEIGHT_SCALE = "weight_scale"
"""Attribute of such a linear: the scale of a weight that is in float8 already; None: the weight is cast."""


@dataclass(frozen=True)
class Float8Layers:
    """Makes linears and experts of layers multiply in float8."""

    recipe: Recipe
    names: Collection[str]
    """The paths of the linears in the model, and of experts."""
    tp: Group
    cp: Group
    etp: Group = field(default_factory=lambda: alone("etp"))

    def apply(
        self, layer: NamedLayer, queue: WeightGradientQueue, scales: Mapping[int, Tensor], *, on_parts: bool
    ) -> None:
        """Make those linears and experts of `layer` that are among `names` multiply in float8.

        To be called after the rules of tensor parallelism were applied. `scales`: those of weights that are
        in float8 already, by the id of the parameter. `on_parts`: whether the layer runs on parts of the
        sequence, so that linears outside of its regions see a part of the tokens.
        """
        for name, experts in experts_in(layer.module):
            if join(layer.path, name) in self.names and experts.casts is None:
                experts.casts = ExpertCasts.over(self.etp)
        for name, module in layer.module.named_modules(remove_duplicate=False):
            if join(layer.path, name) in self.names and getattr(module, CASTS, None) is None:
                # A buffer, so that graphs of equal layers take it as an argument.
                module.register_buffer(WEIGHT_SCALE, scales.get(id(module.weight)), persistent=False)
                self._apply(module, queue, on_parts=on_parts)
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


def casts_in(layer: nn.Module) -> list[LinearCasts | MatrixCasts]:
    """Return the casts of the linears in `layer` that multiply in float8, and of its experts' matrices."""
    found = list[LinearCasts | MatrixCasts]()
    for module in layer.modules():
        casts = getattr(module, CASTS, None)
        if isinstance(casts, ExpertCasts):
            found += [casts.gate_up, casts.down]
        elif casts is not None:
            found.append(casts)
    return found


def _without_fast_path(module: nn.Module) -> None:
    """Make torch's encoder layer call its linears in evaluations, too, in place of a kernel of its own."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # what its forward asks for the kernel's activation


def _run(module: Any, queue: WeightGradientQueue, is_transposed: bool, input: Tensor) -> Tensor:
    return float8_linear(module, input, queue, is_transposed=is_transposed)


def _of_several(group: Group) -> Groups:
    return (group,) if group.size > 1 else ()
