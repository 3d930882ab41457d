"""The operands of a linear's three products, cast to float8 with scales that its ranks have in common.

    O  = X Wᵀ     X [tokens, inputs]     W [outputs, inputs]
    dX = G W      G [tokens, outputs]
    dW = Gᵀ X

Ranks may hold parts of each of the three dims: of tokens under `cp`, and under `tp` where a layer runs on
parts of the sequence; of inputs in a row-parallel linear; of outputs in a column-parallel one. A scale comes
from the largest value of the whole tensor, or of a whole row of it, so that all ranks cast alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plait.ranks.collectives import all_reduce
from plait.ranks.group import Group
from plait.tensor.autograd.kept_results import computed_once
from plait.tensor.float8.cast import ScaledMatrix, cast_by, factor_of, largest_of
from plait.tensor.float8.recipes import CastFormat, Recipe

Groups = tuple[Group, ...]
ReduceOverGroups = Callable[[Tensor, Groups], Tensor]
"""Returns the elementwise maximum over the ranks of all groups."""


@dataclass(frozen=True)
class DividedDims:
    """The groups of ranks between which each dim of a linear is divided; none where each rank has all."""

    tokens: Groups = ()
    inputs: Groups = ()
    outputs: Groups = ()


WHOLE = DividedDims()
"""Each rank has all of each dim."""


Operand = Literal[
    "input", "input_for_weight", "gradient", "gradient_for_weight", "weight", "weight_for_input"
]
"""An operand of a product, as the method of `LinearCasts` that returns it is called."""


class LinearCasts:
    """Casts the operands of one linear, and remembers a step's factors of its weight.

    Communication of a cast: an all-reduce of largest values over each group between whose ranks the tensor,
    or a row of it, is divided.
    """

    def __init__(
        self, recipe: Recipe, divided: DividedDims = WHOLE, reduce_largest: ReduceOverGroups | None = None
    ) -> None:
        """`reduce_largest`: by default `reduced`."""
        self.recipe, self.divided = recipe, divided
        self._reduce: ReduceOverGroups = reduce_largest or reduced
        self._factors: dict[tuple[CastFormat, int], Tensor] = {}
        """Of the weight in this step, by format and the dim that a product sums over."""
        self.note: Callable[[Operand, Tensor, ScaledMatrix], None] | None = None
        """Called with each operand that is cast and the result; a verification sets it."""

    def reducing(self, reduce_largest: ReduceOverGroups) -> LinearCasts:
        """Return casts that reduce largest values by `reduce_largest`, without factors of the weight."""
        return LinearCasts(self.recipe, self.divided, reduce_largest)

    def all_groups(self) -> set[Groups]:
        """Return the groups of all reductions that casts may make."""
        dims = self.divided
        pairs = (dims.tokens, dims.inputs), (dims.tokens, dims.outputs), (dims.outputs, dims.inputs)
        single = {dims.tokens, dims.inputs, dims.outputs}
        return {one for one in single | {(*a, *b) for a, b in pairs} if one}

    def begin_step(self) -> None:
        """Forget the factors of the weight, whose values may have changed."""
        self._factors.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of the remembered factors."""
        return sum(factor.nbytes for factor in self._factors.values())

    @property
    def are_divided(self) -> bool:
        """Whether casts may communicate: a dim is divided between ranks."""
        return self.divided != WHOLE

    @property
    def gives_summands(self) -> bool:
        """Whether outputs are summands of several ranks, since the dim that they sum over is divided."""
        return bool(self.divided.inputs)

    def input(self, rows: Tensor) -> ScaledMatrix:
        """Return the input X, `[tokens, inputs]`, cast for the product that computes the output."""
        dims = self.divided
        return self._cast("input", rows, self.recipe.input, 1, (dims.tokens, dims.inputs), once=True)

    def input_for_weight(self, rows: Tensor, for_output: ScaledMatrix) -> ScaledMatrix | None:
        """Return X, `[tokens, inputs]`, cast for the weight gradient; None where that takes X as it is."""
        form, dims = self.recipe.input_for_weight, self.divided
        if form is None:
            return None
        if form == self.recipe.input and form.per == "tensor":
            return for_output
        return self._cast("input_for_weight", rows, form, 0, (dims.tokens, dims.inputs), once=True)

    @property
    def casts_gradient_once(self) -> bool:
        """Whether both products with G take it cast with one scale, so that ranks can gather it cast."""
        return (
            self.recipe.gradient == self.recipe.gradient_for_weight and self.recipe.gradient.per == "tensor"
        )

    def gradient(self, rows: Tensor, parts: Groups = ()) -> ScaledMatrix:
        """Return the output gradient G, `[tokens, outputs]`, cast for the input gradient's product."""
        tokens, outputs = (*parts, *self.divided.tokens), self.divided.outputs
        return self._cast("gradient", rows, self.recipe.gradient, 1, (tokens, outputs))

    def gradient_for_weight(self, rows: Tensor, for_input: ScaledMatrix | None) -> ScaledMatrix | None:
        """Return G, `[tokens, outputs]`, cast for the weight gradient; None where that takes G as it is.

        `for_input`: by `gradient`; None where no input gradient is computed.
        """
        form, dims = self.recipe.gradient_for_weight, self.divided
        if form is None:
            return None
        if for_input is not None and form == self.recipe.gradient and form.per == "tensor":
            return for_input
        return self._cast("gradient_for_weight", rows, form, 0, (dims.tokens, dims.outputs))

    def weight(self, weight: Tensor, scale: Tensor | None) -> ScaledMatrix:
        """Return the weight W, `[outputs, inputs]`, cast for the product that computes the output.

        `scale`: that of a weight that is in float8 already; None: it is cast.
        """
        return self._weight("weight", weight, scale, self.recipe.weight, 1)

    def weight_for_input(self, weight: Tensor, scale: Tensor | None) -> ScaledMatrix:
        """Return W, `[outputs, inputs]`, cast for the input gradient; `scale` as for `weight`."""
        return self._weight("weight_for_input", weight, scale, self.recipe.weight_for_input, 0)

    def _weight(
        self, operand: Operand, weight: Tensor, scale: Tensor | None, form: CastFormat, summed: int
    ) -> ScaledMatrix:
        if scale is not None:
            return self._noted(operand, weight, ScaledMatrix(weight, scale))
        key = form, summed if form.per == "row" else 0
        if key not in self._factors:
            groups = _groups(form, summed, (self.divided.outputs, self.divided.inputs))
            self._factors[key] = factor_of(self._reduced(largest_of(weight, form.per, summed), groups), form)
        return self._noted(operand, weight, cast_by(weight, self._factors[key], form))

    def _cast(
        self,
        operand: Operand,
        matrix: Tensor,
        form: CastFormat,
        summed: int,
        dims: tuple[Groups, Groups],
        *,
        once: bool = False,
    ) -> ScaledMatrix:
        """Return `matrix` in float8, for a product that sums over its dim `summed`; `dims`: who divides each.

        `once`: a layer that is recomputed reduces the largest values in its first run only.
        """
        local, groups = largest_of(matrix, form.per, summed), _groups(form, summed, dims)
        if once and groups:
            largest = computed_once(lambda: self._reduced(local, groups))
        else:
            largest = self._reduced(local, groups)
        return self._noted(operand, matrix, cast_by(matrix, factor_of(largest, form), form))

    def _noted(self, operand: Operand, matrix: Tensor, cast: ScaledMatrix) -> ScaledMatrix:
        if self.note is not None:
            self.note(operand, matrix, cast)
        return cast

    def _reduced(self, largest: Tensor, groups: Groups) -> Tensor:
        return self._reduce(largest, groups) if groups else largest


def transposed(matrix: ScaledMatrix) -> ScaledMatrix:
    """Return the transpose of a matrix: a view of its data, and its scales in the other direction."""
    return ScaledMatrix(matrix.data.t(), matrix.scale if matrix.scale.dim() == 0 else matrix.scale.t())


def _groups(form: CastFormat, summed: int, dims: tuple[Groups, Groups]) -> Groups:
    """Return the groups whose ranks hold other parts of the tensor, or of each vector along `summed`."""
    return dims[summed] if form.per == "row" else (*dims[0], *dims[1])


def reduced(largest: Tensor, groups: Groups) -> Tensor:
    """Return the largest values over the ranks of all groups. Communication: an all-reduce over each."""
    for group in groups:
        if largest.is_meta:
            group.skip("all_reduce", largest)
        else:
            largest = all_reduce(largest, group, "max", out=torch.empty_like(largest), checked=False).wait()
    return largest
