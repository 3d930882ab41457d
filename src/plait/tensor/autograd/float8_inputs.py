"""Inputs of float8 linears, cast once for all linears that read them, and the sums of their gradients.

Linears that read one tensor, such as query, key and value, share its cast. Their input gradients are summed
before they are rounded to 16 bits, in a region of tensor parallelism those of all ranks:

    input  ─ carrier ─┬─ query        the carrier has the shape of the input, wide dtype, and no memory;
                      ├─ key          its backward computes the gradients of all its readers, so that what
                      └─ value        their scales need is reduced once

Where the sequence is in parts, and nothing but float8 linears reads the input of a region, each rank casts
its part, and the parts are gathered in eight bits. The tensor that enters has no memory then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.ranks.group import Group
from plait.tensor.autograd.float8_operands import (
    DividedDims,
    LinearCasts,
    MatrixToCast,
    reduced,
    reduced_together,
)
from plait.tensor.autograd.private_torch_functions import apply_function, rows_of
from plait.tensor.autograd.regathered_activations import Gather, PendingTensor, own_range, version_of
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import by_columns


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of float8 products are kept: fp32, or `dtype` if it is as wide."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def carrier_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return a carrier: a placeholder of the shape of `tensor` (or `shape`), one element, in a wide dtype."""
    shape = tensor.shape if shape is None else shape
    return tensor.new_empty_strided(shape, (0,) * len(shape), dtype=wide(tensor.dtype))


def sum_of_gradients(*gradients: Tensor | None) -> Tensor | None:
    """Return the sum of gradients of one tensor, in the widest of their dtypes; None if there are none."""
    given = [one for one in gradients if one is not None]
    return reduce(operator.add, given) if given else None


@dataclass(frozen=True)
class LinearGradient:
    """The gradient of one float8 linear's output, and a function that computes its input's."""

    matrices: Sequence[MatrixToCast]
    compute: Callable[[Sequence[ScaledMatrix]], Tensor | None]
    """Queues the weight gradient; returns the gradient of the input in its wide dtype, or None. Given the
    casts of `matrices`."""


class InputGradient:
    """The gradient of an input that several float8 linears read, from the gradients of their outputs."""

    def __init__(self) -> None:
        self._outputs: list[LinearGradient] = []

    def add(self, output: LinearGradient) -> None:
        """Add the output gradient of one linear; `total` casts it and computes the input gradient."""
        self._outputs.append(output)

    def total(self) -> Tensor | None:
        """Return the sum of the linears' input gradients, in the wide dtype; None if there are none.

        Communication: one reduction of largest values over each set of ranks with parts of some.
        """
        outputs, self._outputs = self._outputs, []
        matrices = [matrix for one in outputs for matrix in one.matrices]
        largest = iter(reduced_together([one.largest for one in matrices], reduced))
        total: Tensor | None = None
        for one in outputs:  # cast one by one, since casts take more memory than what is cast
            made = one.compute([matrix.by(next(largest)) for matrix in one.matrices])
            total = made if total is None or made is None else total.add_(made)
        return total


@dataclass(frozen=True)
class InputParts:
    """This rank's part of an input of float8 linears, and the all-gather of the whole input."""

    part: Tensor
    gather: Gather
    start: Callable[[Tensor], PendingTensor]
    """Starts the gather of a tensor from parts like `part`."""
    saves_part: bool
    """Whether linears save the part, and gather it again for weight gradients."""
    trace_regathers: bool = False
    """Whether `start` records gathers in a trace that weight gradients repeat."""

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor that is gathered from parts like `part`. Communication: one all-gather."""
        return self.start(part)()


@dataclass(frozen=True)
class SavedInput:
    """What a linear saves of its input for the weight gradient: a matrix, or this rank's part of it."""

    data: Tensor
    """In float8, or as the input is where the weight gradient is not computed in float8."""
    scale: Tensor | None
    gather: Gather | None
    """How the whole is gathered again from the ranks' parts; None: `data` is the whole."""


class CastInput:
    """One input of float8 linears: its casts, and the carrier (a placeholder) that takes its gradient."""

    def __init__(
        self,
        input: Tensor,
        casts: LinearCasts,
        carrier: Tensor | None,
        gradient: InputGradient,
        parts: InputParts | None,
    ) -> None:
        """`carrier`: None without gradients. `parts`: from which `input`, without memory, is gathered."""
        self.carrier, self.gradient = carrier, gradient
        self._casts, self._parts = casts, parts
        self._own = casts.input(*self._operand(input))
        self._for_output = None if parts is not None else self._own
        self._saved: SavedInput | None = None

    def _operand(self, input: Tensor) -> tuple[Tensor, tuple[Group, ...]]:
        """Return the matrix that this rank casts, and the groups between whose ranks tokens are divided."""
        if self._parts is None:
            return rows_of(input.detach()), ()
        return rows_of(self._parts.part), (self._parts.gather.group,)

    @property
    def for_output(self) -> ScaledMatrix:
        """The whole input, cast for the product that computes the output.

        Communication: on first use, gathers it where ranks have parts: in eight bits, and scales of tokens.
        """
        if self._for_output is None:
            assert self._parts is not None
            self._for_output = _gathered(self._own, self._parts)
        return self._for_output

    def saved(
        self, input: Tensor, source: tuple[Tensor, Gather] | None, *, is_traced: bool = False
    ) -> SavedInput:
        """Return the tensors of `input` to save for the weight gradient: float8 and scale, or as it is.

        `source`: this rank's part, from which the input was gathered, and how; None: it is saved whole.
        `is_traced`: by columns, as the product needs it, so that the layer's graph writes it so; but not a
        matrix that was gathered in float8 and is gathered again: a copy of it would be saved, whole, in place
        of this rank's part.
        """
        if self._saved is None:
            saved = self._to_save(input, source)
            is_gathered_again = self._parts is not None and self._parts.trace_regathers
            if is_traced and saved.scale is not None and not is_gathered_again:
                saved = SavedInput(*by_columns(ScaledMatrix(saved.data, saved.scale)), saved.gather)
            self._saved = saved
        return self._saved

    def _to_save(self, input: Tensor, source: tuple[Tensor, Gather] | None) -> SavedInput:
        parts = self._parts
        rows, groups = self._operand(input)
        cast = self._casts.input_for_weight(rows, self._own, groups)
        if parts is None:
            part, gather = source or (input, None)
            if cast is None:
                return SavedInput(part, None, gather)
            return SavedInput(own_part(cast.data, input.shape, gather), cast.scale, gather)
        if cast is self._own and not parts.saves_part:
            return SavedInput(*self.for_output, None)
        own, scale = (parts.part, None) if cast is None else (cast.data.view(parts.part.shape), cast.scale)
        if parts.saves_part:
            return SavedInput(own, scale, parts.gather)
        return SavedInput(rows_of(parts.whole(own)), scale, None)


def _gathered(own: ScaledMatrix, parts: InputParts) -> ScaledMatrix:
    """Return the whole matrix of which `own` is this rank's rows, with the scales of all rows."""
    shape = parts.part.shape
    data = parts.start(own.data.view(shape))
    if own.scale.dim() == 0:
        return ScaledMatrix(rows_of(data()), own.scale)
    scale = parts.start(own.scale.view(*shape[:-1], 1))
    return ScaledMatrix(rows_of(data()), rows_of(scale()))


def own_part(data: Tensor, shape: torch.Size, gather: Gather | None) -> Tensor:
    """Return this rank's part of `data`, a matrix of a tensor of `shape`; all of it without `gather`."""
    if gather is None:
        return data
    return own_range(data.view(shape), gather.group, gather.dim).clone()


@dataclass(frozen=True)
class _Entered:
    """The input of a region: its version counter, its carrier, and the gradient of that."""

    version: int
    carrier: Tensor | None
    gradient: InputGradient
    parts: InputParts | None


@dataclass
class CastInputs:
    """The float8 casts of the inputs of linears, by input, while a layer runs."""

    _known: MutableMapping[Tensor, tuple[int, dict[DividedDims, CastInput]]] = field(
        default_factory=WeakTensorKeyDictionary
    )
    """By input: its version counter, and its casts by how its dims are divided."""
    _entered: MutableMapping[Tensor, _Entered] = field(default_factory=WeakTensorKeyDictionary)
    """By input of a region, whose carrier's gradient is summed over the ranks."""
    _regions: list[bool] = field(default_factory=list)
    """Of the regions that the running layer has not entered yet, see `begin`."""

    def begin(self, regions: Sequence[bool]) -> None:
        """Begin a layer's run; `regions`: for each region, whether only float8 linears read its input."""
        self._regions = list(regions)

    def take_region(self) -> bool:
        """Return whether only float8 linears read the input of the next region, and step past it."""
        return bool(self._regions) and self._regions.pop(0)

    def enter(
        self,
        input: Tensor,
        carrier: Tensor | None,
        gradient: InputGradient,
        parts: InputParts | None = None,
    ) -> None:
        """Register the input of a region, and its carrier, whose gradient the region's entrance takes.

        `parts`: from which `input` is to be gathered; it has no memory then.
        """
        self._entered[input] = _Entered(version_of(input), carrier, gradient, parts)

    def of(self, input: Tensor, casts: LinearCasts) -> CastInput:
        """Return the casts of `input` by `casts`, made for the first linear that reads it."""
        version, known = self._known.get(input, (-1, {}))
        if version != version_of(input):
            known = {}
            self._known[input] = version_of(input), known
        if casts.divided not in known:
            known[casts.divided] = self._cast(input, casts)
        found = known[casts.divided]
        if found.carrier is None and torch.is_grad_enabled():  # linears that read it before need no gradient
            found.carrier = carrier_of(input, found.gradient, input.shape)
        return found

    def _cast(self, input: Tensor, casts: LinearCasts) -> CastInput:
        entered = self._entered.get(input)
        if entered is not None and entered.version == version_of(input):  # else a write would get no gradient
            return CastInput(input, casts, entered.carrier, entered.gradient, entered.parts)
        gradient = InputGradient()
        carrier = carrier_of(input, gradient, input.shape) if torch.is_grad_enabled() else None
        return CastInput(input, casts, carrier, gradient, None)

    def forget(self) -> None:
        """Free the casts and carriers; to be called after a layer's run."""
        self._known.clear()
        self._entered.clear()
        self._regions.clear()


def carrier_of(
    input: Tensor,
    gradient: InputGradient,
    shape: Sequence[int],
    backward: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the carrier (a placeholder that takes the gradient) of linears' `input`, or of its whole.

    `gradient`: to which the linears add. `backward` returns the gradient of `input` from that of the carrier;
    None: as it is.
    """
    carrier: Tensor = apply_function(_Carrier, input, gradient, shape, backward)
    return carrier


class _Carrier(torch.autograd.Function):
    """Autograd function from an input to its carrier, whose gradient it rounds to the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        gradient: InputGradient,
        shape: Sequence[int],
        backward: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.gradient, ctx.gradient_of = input.dtype, gradient, backward
        return carrier_like(input, shape)

    @staticmethod
    def backward(ctx: Any, of_carrier: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        total = sum_of_gradients(of_carrier, ctx.gradient.total())
        if total is not None and ctx.gradient_of is not None:
            total = ctx.gradient_of(total)
        return None if total is None else total.to(ctx.dtype), None, None, None


def as_matrix(saved: Tensor, scale: Tensor) -> ScaledMatrix:
    """Return a saved tensor `[..., width]` in float8 as a matrix with its scales."""
    return ScaledMatrix(rows_of(saved), scale)
