"""Products of experts in float8, cast row by row: the recipe `float8-rowwise-gw`, whatever linears have.

    output             O  = X Wᵀ     a scale for each row of X, and for each output feature of an expert's W
    input gradient     dX = G W      a scale for each row of G, and for each expert's W
    weight gradient    dW = Gᵀ X     not in float8

A row's scale comes from that row alone, so it does not matter which other rows a rank has: not how tokens are
divided between ranks, nor in which micro-batches they come. A scale for all rows of an expert, or for each
feature over its rows, would depend on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.ranks.group import Group
from plait.tensor.autograd.float8_operands import Operand, reduced
from plait.tensor.experts.copies_of_tokens import TokenRows
from plait.tensor.experts.grouped_float8_products import grouped_float8_product
from plait.tensor.experts.grouped_products import Groups
from plait.tensor.float8.cast import ScaledMatrix, cast_by, factor_of, largest_of
from plait.tensor.float8.recipes import RECIPES, CastFormat

EXPERT_RECIPE = "float8-rowwise-gw"
"""The recipe of experts under every value of `Plan.linears` that is in float8."""
_RECIPE = RECIPES[EXPERT_RECIPE]


class MatrixCasts:
    """Multiplies rows by one matrix of each expert in float8, and remembers a step's factors of the matrices.

    Weights are `[experts, outputs, inputs]`. Communication of a cast: an all-reduce of largest values over
    `etp` where that divides the row: the inputs of `down`, and the gradients of gate and up.
    """

    def __init__(
        self, *, inputs: tuple[Group, ...] = (), outputs: tuple[Group, ...] = (), keeps_weights: bool = False
    ) -> None:
        """`inputs`, `outputs`: the groups of ranks between which that dim of each matrix is divided.

        `keeps_weights`: whether the matrices are cast once a step, for all micro-batches, to memory that is
        kept: a byte an element for each of the two products. Else they are cast for each product.
        """
        self._inputs, self._outputs, self.keeps_weights = inputs, outputs, keeps_weights
        self._factors: dict[Operand, Tensor] = {}
        """Of the weights in this step."""
        self._casts: dict[Operand, ScaledMatrix] = {}
        """The weights in this step, if they are kept."""
        self._memory: dict[Operand, Tensor] = {}
        """To which kept weights are cast, in each step."""
        self.note: Callable[[Operand, Tensor, ScaledMatrix], None] | None = None
        """Called with each operand that is cast, in rows of pairs, and the result; a verification sets it."""

    def begin_step(self) -> None:
        """Forget factors and casts of the weights, whose values may have changed."""
        self._factors.clear()
        self._casts.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of the remembered factors or scales, and of the memory of kept casts."""
        scales = (cast.scale for cast in self._casts.values())
        return sum(one.nbytes for one in (*self._factors.values(), *scales, *self._memory.values()))

    @property
    def are_divided(self) -> bool:
        """Whether casts may communicate: a dim is divided between ranks."""
        return bool(self._inputs or self._outputs)

    def products(self, given: Tensor, copies: TokenRows | None, weight: Tensor, groups: Groups) -> Tensor:
        """Return the outputs of rows `[A, inputs]`, each by the matrix of its expert, in their dtype.

        `given`: the rows, or the tokens of which they are `copies`, so that only these are cast.
        """
        rows = self._rows("input", given, copies, _RECIPE.input, self._inputs)
        matrices = self._weight("weight", weight, _RECIPE.weight, self._inputs)
        by_column = ScaledMatrix(matrices.data.mT, matrices.scale.mT)
        return grouped_float8_product(rows, by_column, groups, given.dtype)

    def input_gradients(
        self, given: Tensor, copies: TokenRows | None, weight: Tensor, groups: Groups
    ) -> Tensor:
        """Return the gradients of the inputs from those of the outputs; arguments as of `products`."""
        rows = self._rows("gradient", given, copies, _RECIPE.gradient, self._outputs)
        divided = (*self._inputs, *self._outputs)
        matrices = self._weight("weight_for_input", weight, _RECIPE.weight_for_input, divided)
        return grouped_float8_product(rows, matrices, groups, given.dtype)

    def _rows(
        self,
        operand: Operand,
        given: Tensor,
        copies: TokenRows | None,
        form: CastFormat,
        divided: tuple[Group, ...],
    ) -> ScaledMatrix:
        """Return the rows in float8, with a scale for each; ranks of `divided` have other parts of them."""
        largest = reduced(largest_of(given, form.per, 1), divided)
        cast = cast_by(given, factor_of(largest, form), form)
        if copies is not None:
            data = copies.copies(cast.data.view(torch.uint8))  # not every operation knows float8
            cast = ScaledMatrix(data.view(form.dtype), copies.copies(cast.scale))
        if self.note is not None:
            self.note(operand, given if copies is None else copies.copies(given), cast)
        return cast

    def _weight(
        self, operand: Operand, weight: Tensor, form: CastFormat, divided: tuple[Group, ...]
    ) -> ScaledMatrix:
        """Return the weights in float8: a scale for each output feature of a matrix, or for each matrix."""
        cast = self._casts.get(operand)
        if cast is None:
            if operand not in self._factors:
                self._factors[operand] = _factor_of_weight(weight, form, divided)
            if self.keeps_weights:
                memory = self._memory_of(operand, weight, form)
                cast = self._casts[operand] = cast_by(weight, self._factors.pop(operand), form, memory)
            else:
                cast = cast_by(weight, self._factors[operand], form)
        if self.note is not None:
            self.note(operand, weight, cast)
        return cast

    def _memory_of(self, operand: Operand, weight: Tensor, form: CastFormat) -> Tensor:
        """Return the memory of a kept cast: `[experts, outputs, inputs]`, stored as its product reads it."""
        found = self._memory.get(operand)
        if found is None:
            count, rows, columns = weight.shape
            if operand == "weight":  # which is multiplied by its rows
                found = weight.new_empty(count, rows, columns, dtype=form.dtype)
            else:
                found = weight.new_empty(count, columns, rows, dtype=form.dtype).mT
            self._memory[operand] = found
        return found


def _factor_of_weight(weight: Tensor, form: CastFormat, divided: tuple[Group, ...]) -> Tensor:
    """Return the factors of matrices `[experts, outputs, inputs]`: of their rows, or of each matrix."""
    largest = largest_of(weight, "row", 2)
    if form.per == "tensor":
        largest = largest.amax(1, keepdim=True)
    return factor_of(reduced(largest, divided), form)


@dataclass(frozen=True)
class ExpertCasts:
    """Multiplies by the matrices of experts in float8: a `MatrixCasts` of `gate_up` and one of `down`."""

    gate_up: MatrixCasts
    down: MatrixCasts

    @staticmethod
    def over(etp: Group, *, keeps_weights: bool = False) -> ExpertCasts:
        """Return `ExpertCasts` for experts whose inner features are divided between the ranks of `etp`.

        `keeps_weights`: as of `MatrixCasts`.
        """
        groups = (etp,) if etp.size > 1 else ()
        return ExpertCasts(
            MatrixCasts(outputs=groups, keeps_weights=keeps_weights),
            MatrixCasts(inputs=groups, keeps_weights=keeps_weights),
        )
