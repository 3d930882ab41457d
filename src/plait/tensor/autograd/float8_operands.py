"""The operands of a linear's three products, cast to float8 with scales that its ranks have in common.

    O  = X Wᵀ     X [tokens, inputs]     W [outputs, inputs]
    dX = G W      G [tokens, outputs]
    dW = Gᵀ X

Ranks may hold parts of each of the three dims: of tokens under `cp`, and under `tp` where a layer runs on
parts of the sequence; of inputs in a row-parallel linear; of outputs in a column-parallel one. A scale comes
from the largest value of the whole tensor, or of a whole row of it, so that all ranks cast alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


FactorKey = tuple[CastFormat, int]
"""Which factor of a weight: the format, and for one a row the dim that a product sums over."""
Operand = Literal[
    "input", "input_for_weight", "gradient", "gradient_for_weight", "weight", "weight_for_input"
]
"""An operand of a product, as the method of `LinearCasts` that returns it is called."""


class LinearCasts:
    """Casts one linear's operands to float8, and remembers a step's scaling factors of its weight.

    Communication of a cast: an all-reduce of largest values over each group between whose ranks the tensor,
    or a row of it, is divided.
    """

    def __init__(
        self, recipe: Recipe, divided: DividedDims = WHOLE, reduce_largest: ReduceOverGroups | None = None
    ) -> None:
        """`reduce_largest`: by default `reduced`."""
        self.recipe, self.divided = recipe, divided
        self.reduce: ReduceOverGroups = reduce_largest or reduced
        self._factors: dict[FactorKey, Tensor] = {}
        """Of the weight in this step, by format and the dim that a product sums over."""
        self.buffers: dict[FactorKey, Tensor] = {}
        """Where factors are stored, if graphs read them there."""
        self.compute: torch.dtype | None = None
        """The dtype that a weight has which is in float8 already, but for `Plan.linears`; None: not known."""
        self.note: Callable[[Operand, Tensor, ScaledMatrix], None] | None = None
        """Called with each operand that is cast and the result; a verification sets it."""

    def reducing(self, reduce_largest: ReduceOverGroups) -> LinearCasts:
        """Return a copy that reduces largest values by `reduce_largest`, and remembers no factors yet."""
        return LinearCasts(self.recipe, self.divided, reduce_largest)

    def all_groups(self, parts: Groups) -> set[Groups]:
        """Return the groups of all reductions that casts of gradients and weights may make.

        `parts`: as for `gradient`.
        """
        dims = self.divided
        tokens = (*parts, *dims.tokens)
        pairs = (tokens, dims.outputs), (dims.outputs, dims.inputs)
        single = {tokens, dims.inputs, dims.outputs}
        return {one for one in single | {(*a, *b) for a, b in pairs} if one}

    def begin_step(self) -> None:
        """Forget the factors of the weight, whose values may have changed."""
        self._factors.clear()

    def factors_to_find(self, weight: Tensor, *, learns: bool) -> list[FactorToFind]:
        """Return the scaling factors of `weight` that are still to be computed in this step.

        `weight` is `[outputs, inputs]`. `learns`: whether input gradients are computed.
        """
        wanted = list(dict.fromkeys((self.key_of_weight, self.key_of_weight_for_input)))
        return [
            FactorToFind(self, key, Largest.of(weight, *key, self._groups_of_weight(*key)))
            for key in (wanted if learns else wanted[:1])
            if key not in self._factors
        ]

    @property
    def key_of_weight(self) -> FactorKey:
        """The key of the factor by which W is cast in O = X Wᵀ."""
        return _factor_key(self.recipe.weight, 1)

    @property
    def key_of_weight_for_input(self) -> FactorKey:
        """The key of the factor by which W is cast in dX = G W."""
        return _factor_key(self.recipe.weight_for_input, 0)

    @property
    def nbytes(self) -> int:
        """The bytes of all remembered factors together."""
        return sum(factor.nbytes for factor in self._factors.values())

    @property
    def are_divided(self) -> bool:
        """Whether casts may communicate: a dim is divided between ranks."""
        return self.divided != WHOLE

    @property
    def gives_summands(self) -> bool:
        """Whether outputs are summands of several ranks, since the dim that they sum over is divided."""
        return bool(self.divided.inputs)

    def input(self, rows: Tensor, parts: Groups = ()) -> ScaledMatrix:
        """Return the input X, `[tokens, inputs]`, cast for the product that computes the output.

        `parts`: the groups between whose ranks `rows` are divided, beside those of `divided`.
        """
        return self._input("input", rows, self.recipe.input, 1, parts)

    def input_for_weight(
        self, rows: Tensor, for_output: ScaledMatrix, parts: Groups = ()
    ) -> ScaledMatrix | None:
        """Return X, `[tokens, inputs]`, cast for the weight gradient; None where that takes X as it is.

        `parts`: as for `input`.
        """
        form = self.recipe.input_for_weight
        if form is None or self.recipe.casts_input_once:
            return None if form is None else for_output
        return self._input("input_for_weight", rows, form, 0, parts)

    def _input(
        self, operand: Operand, rows: Tensor, form: CastFormat, summed: int, parts: Groups
    ) -> ScaledMatrix:
        tokens, inputs = (*parts, *self.divided.tokens), self.divided.inputs
        return self._cast(operand, rows, form, summed, (tokens, inputs), once=True)

    def gradient(self, rows: Tensor, parts: Groups = ()) -> MatrixToCast:
        """Return the output gradient G, `[tokens, outputs]`, to be cast for the input gradient's product.

        `parts`: as for `input`. Where the recipe casts G once, that cast is also for the weight gradient.
        """
        tokens, outputs = (*parts, *self.divided.tokens), self.divided.outputs
        return self._to_cast("gradient", rows, self.recipe.gradient, 1, (tokens, outputs))

    def gradient_for_weight(self, rows: Tensor, parts: Groups = ()) -> MatrixToCast | None:
        """Return G, `[tokens, outputs]`, to be cast for the weight gradient; None if that takes G as it is.

        `parts`: as for `input`.
        """
        form, outputs = self.recipe.gradient_for_weight, self.divided.outputs
        tokens = (*parts, *self.divided.tokens)
        return (
            None if form is None else self._to_cast("gradient_for_weight", rows, form, 0, (tokens, outputs))
        )

    def weight(self, weight: Tensor, scale: Tensor | None, factor: Tensor | None = None) -> ScaledMatrix:
        """Return the weight W, `[outputs, inputs]`, cast for the product that computes the output.

        `scale`: that of a weight that is in float8 already; None: it is cast. `factor`: by which; None: by
        that of the step, which is found if it is not known.
        """
        return self._weight("weight", weight, scale, self.key_of_weight, factor)

    def weight_for_input(
        self, weight: Tensor, scale: Tensor | None, factor: Tensor | None = None
    ) -> ScaledMatrix:
        """Return W, `[outputs, inputs]`, cast for the input gradient; other arguments as of `weight`."""
        return self._weight("weight_for_input", weight, scale, self.key_of_weight_for_input, factor)

    def _weight(
        self,
        operand: Operand,
        weight: Tensor,
        scale: Tensor | None,
        key: FactorKey,
        factor: Tensor | None,
    ) -> ScaledMatrix:
        if scale is not None:
            return self.noted(operand, weight, ScaledMatrix(weight, scale))
        if factor is None:
            find_factors([one for one in self.factors_to_find(weight, learns=True) if one.key == key])
            factor = self._factors[key]
        return self.noted(operand, weight, cast_by(weight, factor, key[0]))

    def _groups_of_weight(self, form: CastFormat, summed: int) -> Groups:
        return _groups(form, summed, (self.divided.outputs, self.divided.inputs))

    def set_factor(self, key: FactorKey, factor: Tensor) -> None:
        """Remember a factor of the weight until the step ends."""
        if key in self.buffers:
            factor = self.buffers[key].copy_(factor)
        self._factors[key] = factor

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
        waiting = self._to_cast(operand, matrix, form, summed, dims)
        if once and waiting.largest.groups:
            (largest,) = computed_once(lambda: reduced_together([waiting.largest], self.reduce))
        else:
            (largest,) = reduced_together([waiting.largest], self.reduce)
        return waiting.by(largest)

    def _to_cast(
        self,
        operand: Operand,
        matrix: Tensor,
        form: CastFormat,
        summed: int,
        dims: tuple[Groups, Groups],
    ) -> MatrixToCast:
        largest = Largest.of(matrix, form, summed, _groups(form, summed, dims))
        return MatrixToCast(self, operand, matrix, form, largest)

    def noted(self, operand: Operand, matrix: Tensor, cast: ScaledMatrix) -> ScaledMatrix:
        """Return `cast`, after `self.note`, if set, was called with it."""
        if self.note is not None:
            self.note(operand, matrix, cast)
        return cast


@dataclass(frozen=True)
class Largest:
    """Largest absolute values of this rank's part of a tensor or its rows; the groups with other parts."""

    values: Tensor
    """fp32, as of `largest_of`."""
    groups: Groups

    @staticmethod
    def of(matrix: Tensor, form: CastFormat, summed: int, groups: Groups) -> Largest:
        """Return the largest absolute value of `matrix`, or of each vector along `summed`, by `form`."""
        return Largest(largest_of(matrix, form.per, summed), groups)


@dataclass(frozen=True)
class MatrixToCast:
    """A matrix to be cast to float8, once the largest values of all ranks are known."""

    casts: LinearCasts
    operand: Operand
    matrix: Tensor
    form: CastFormat
    largest: Largest

    def by(self, largest: Tensor) -> ScaledMatrix:
        """Return the matrix in float8, by scales of the `largest` values of all ranks."""
        cast = cast_by(self.matrix, factor_of(largest, self.form), self.form)
        return self.casts.noted(self.operand, self.matrix, cast)


@dataclass(frozen=True)
class FactorToFind:
    """A scaling factor of a weight that is still to be computed in this step."""

    casts: LinearCasts
    key: FactorKey
    largest: Largest


def cast_together(matrices: Sequence[MatrixToCast]) -> list[ScaledMatrix]:
    """Return matrices in float8. Communication: one reduction over each set of ranks with parts of some."""
    if not matrices:
        return []
    found = reduced_together([one.largest for one in matrices], matrices[0].casts.reduce)
    return [one.by(largest) for one, largest in zip(matrices, found, strict=True)]


def find_factors(factors: Sequence[FactorToFind]) -> None:
    """Compute a step's scaling factors of weights, and remember them. Communication: as `cast_together`."""
    if factors:
        found = reduced_together([one.largest for one in factors], factors[0].casts.reduce)
        for one, largest in zip(factors, found, strict=True):
            one.casts.set_factor(one.key, factor_of(largest, one.key[0]))


def reduced_together(each: Sequence[Largest], reduce: ReduceOverGroups) -> list[Tensor]:
    """Return largest values over all ranks. Communication: one `reduce` for all with the same groups."""
    found = [one.values for one in each]
    for groups in dict.fromkeys(one.groups for one in each if one.groups):
        numbers = [number for number, one in enumerate(each) if one.groups == groups]
        together = _reduced(groups, [found[number] for number in numbers], reduce)
        for number, values in zip(numbers, together, strict=True):
            found[number] = values
    return found


def _reduced(groups: Groups, each: Sequence[Tensor], reduce: ReduceOverGroups) -> Iterable[Tensor]:
    if len(each) == 1:
        return [reduce(each[0], groups)]
    together = reduce(torch.cat([one.reshape(-1) for one in each]), groups)
    parts = torch.split(together, [one.numel() for one in each])
    return [part.view(one.shape) for part, one in zip(parts, each, strict=True)]


def transposed(matrix: ScaledMatrix) -> ScaledMatrix:
    """Return the transpose of a matrix: a view of its data, and its scales in the other direction."""
    return ScaledMatrix(matrix.data.t(), matrix.scale if matrix.scale.dim() == 0 else matrix.scale.t())


def _factor_key(form: CastFormat, summed: int) -> FactorKey:
    return form, summed if form.per == "row" else 0


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
