"""Experts whose products a plan computes in float8, by definition: one expert after the other.

As `docs/guides/experts.md` says it: whatever linears have, output and input gradient of both matrices of an
expert are products of rows with a scale for each, and weight gradients stay in the precision. The weight of a
token multiplies what its experts' second matrix is given, or with `weights_first` the first one.

Letters: T tokens, H hidden features, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import proxy

from torch import Tensor

from plait.plan.rules import join
from plait.tensor.experts.experts import Experts
from plait.tensor.find_module_hooks import is_altered
from plait.tensor.named_layer import NamedLayer
from plait.verification.definitions.attention_and_dropout import Definitions
from plait.verification.definitions.experts import activated, change_of, matrix_of
from plait.verification.definitions.float8 import Casting, Computation, float8_linear
from plait.verification.definitions.float8_linear_selection import MULTIPLE, modules_of
from plait.verification.definitions.float8_scale_recorder import noted

RECIPE = "float8-rowwise-gw"
OF_ROWS = ("input", "gradient")
"""The operands that have a scale for each row."""
MATRICES = ("gate_up_proj", "down_proj")


def experts_in_float8(layers: Sequence[NamedLayer]) -> list[str]:
    """Return the paths of the experts of a model that `Plan.linears` computes in float8."""
    modules = modules_of(layers)
    return [path for path, module in modules.items() if type(module) is Experts and _fits(module, modules)]


def _fits(experts: Experts, modules: dict[str, Any]) -> bool:
    """Return whether both matrices have sizes that CUDA multiplies, and are of these experts alone."""
    matrices = [getattr(experts, name) for name in MATRICES]
    holders = {
        id(other)
        for other in modules.values()
        for parameter in other.parameters(recurse=False)
        if any(parameter is one for one in matrices)
    }
    sizes = [size for one in matrices for size in one.shape[1:]]
    return len(holders) == 1 and not is_altered(experts) and not any(size % MULTIPLE for size in sizes)


def quantise_experts(
    book: Definitions, layers: Sequence[NamedLayer], paths: Sequence[str], casting: Casting = nullcontext
) -> None:
    """Replace the forwards of the experts of `layers` at `paths` by plain definitions in float8.

    `casting` returns the context in which operands are cast.
    """
    modules: dict[str, Any] = modules_of(layers)
    for path in paths:
        modules[path].forward = partial(_experts, book, path, proxy(modules[path]), casting)


@dataclass(frozen=True, eq=False)
class _ExpertsInFloat8Call:
    """One call of experts in float8, by definition; records the scales of its operands."""

    book: Definitions
    path: str
    layer: Any
    casting: Casting
    tokens: int
    """Their number, T."""

    def product(self, name: str, expert: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows times a matrix of an expert in float8, plus its adapter's change of that.

        `tokens`: the token of each row.
        """
        note = partial(self._note, join(self.path, name), expert, tokens)
        matrix, change = matrix_of(self.layer, name, expert), change_of(self.layer, name, expert)
        result = float8_linear(rows, matrix.T, None, Computation(RECIPE, self.casting, note))
        return result if change is None else result + rows @ change

    def _note(self, path: str, expert: int, tokens: Tensor, operand: str, unit: Tensor) -> None:
        if self.book.is_mistaken:
            return
        count, of_rows = self.layer.num_experts, operand in OF_ROWS
        shape = (self.tokens, count) if of_rows else (count, unit.numel())
        table = self.book.scales.table(self, path, operand, shape)
        table[(tokens, expert) if of_rows else expert] = noted(unit).to(table.device)


def _experts(
    book: Definitions,
    path: str,
    layer: Any,
    casting: Casting,
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts of `layer`, `Experts`: `[T, H]`."""
    call, output = (
        _ExpertsInFloat8Call(book, path, layer, casting, len(hidden)),
        hidden.new_zeros(hidden.shape),
    )
    gate_up_bias, down_bias = layer.gate_up_proj_bias, layer.down_proj_bias
    for expert in range(layer.num_experts):
        tokens, slots = (indices == expert).nonzero(as_tuple=True)
        of_token = weights[tokens, slots].unsqueeze(-1).to(hidden.dtype)
        given = hidden[tokens] * of_token if layer.weights_first else hidden[tokens]
        both = call.product("gate_up_proj", expert, given, tokens)
        both = both if gate_up_bias is None else both + gate_up_bias[expert]
        inner = activated(layer.activation, both)
        inner = inner if layer.weights_first else inner * of_token
        result = call.product("down_proj", expert, inner, tokens)
        if down_bias is not None:
            result = result + (down_bias[expert] if layer.weights_first else down_bias[expert] * of_token)
        output = output.index_add(0, tokens, result)
    return output
