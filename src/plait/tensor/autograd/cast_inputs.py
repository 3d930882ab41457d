"""Inputs of float8 linears, cast once for all linears that read them, and the sums of their gradients.

Linears that read one tensor, such as query, key and value, share its cast. Their input gradients are summed
before they are rounded to 16 bits, in a region of tensor parallelism those of all ranks:

    input  ─ carrier ─┬─ query        the carrier has the shape of the input, wide dtype, and no memory;
                      ├─ key          autograd adds up the gradients of its readers in that dtype
                      └─ value
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.tensor.autograd.float8_operands import DividedDims, LinearCasts
from plait.tensor.autograd.regather import Gather, own_range, version_of
from plait.tensor.autograd.torch_calls import apply_function, rows_of
from plait.tensor.float8.cast import ScaledMatrix
from plait.tensor.float8.scaled_product import by_columns


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of float8 products are kept: fp32, or `dtype` if it is as wide."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def carrier_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the shape of `tensor`, in its wide dtype, of one element in memory."""
    return tensor.new_empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=wide(tensor.dtype))


def sum_of_gradients(gradient: Tensor | None, of_carrier: Tensor | None) -> Tensor | None:
    """Return the sum of a tensor's own gradient and that of its carrier, in the carrier's wider dtype."""
    if gradient is None or of_carrier is None:
        return gradient if of_carrier is None else of_carrier
    return of_carrier + gradient


@dataclass(frozen=True)
class SavedInput:
    """What a linear saves of its input for the weight gradient: a matrix, or this rank's part of it."""

    data: Tensor
    """In float8, or as the input is where the weight gradient is not computed in float8."""
    scale: Tensor | None
    gather: Gather | None
    """How the whole is gathered again from the ranks' parts; None: `data` is the whole."""


class CastInput:
    """One input of float8 linears: its carrier, and its casts."""

    def __init__(self, input: Tensor, casts: LinearCasts, carrier: Tensor) -> None:
        self.carrier = carrier
        self.for_output = casts.input(rows_of(input.detach()))
        self._casts = casts
        self._saved: SavedInput | None = None

    def saved(
        self, input: Tensor, source: tuple[Tensor, Gather] | None, *, is_traced: bool = False
    ) -> SavedInput:
        """Return the tensors of `input` to save for the weight gradient: float8 and scale, or as it is.

        `source`: this rank's part, from which the input was gathered, and how; None: it is saved whole.
        `is_traced`: by columns, as the product needs it, so that the layer's graph writes it so.
        """
        if self._saved is None:
            part, gather = source or (input, None)
            cast = self._casts.input_for_weight(rows_of(input.detach()), self.for_output)
            if cast is None:
                self._saved = SavedInput(part, None, gather)
            elif is_traced:
                self._saved = SavedInput(*by_columns(cast), gather)
            else:
                self._saved = SavedInput(own_part(cast.data, input.shape, gather), cast.scale, gather)
        return self._saved


def own_part(data: Tensor, shape: torch.Size, gather: Gather | None) -> Tensor:
    """Return this rank's part of `data`, a matrix of a tensor of `shape`; all of it without `gather`."""
    if gather is None:
        return data
    return own_range(data.view(shape), gather.group, gather.dim).clone()


@dataclass
class CastInputs:
    """The casts of the inputs of float8 linears, while a layer runs."""

    _known: MutableMapping[Tensor, tuple[int, dict[DividedDims, CastInput]]] = field(
        default_factory=WeakTensorKeyDictionary
    )
    """By input: its version counter, and its casts by how its dims are divided."""
    _carriers: MutableMapping[Tensor, tuple[int, Tensor]] = field(default_factory=WeakTensorKeyDictionary)
    """By input of a region: its version counter, and the carrier whose gradient is summed over the ranks."""

    def enter(self, input: Tensor, carrier: Tensor) -> None:
        """Register the carrier of a region's input, whose gradient the region's entrance takes."""
        self._carriers[input] = version_of(input), carrier

    def of(self, input: Tensor, casts: LinearCasts) -> CastInput:
        """Return the casts of `input` by `casts`, made for the first linear that reads it."""
        version, known = self._known.get(input, (-1, {}))
        if version != version_of(input):
            known = {}
            self._known[input] = version_of(input), known
        if casts.divided not in known:
            version, carrier = self._carriers.get(input, (-1, None))
            if carrier is None or version != version_of(input):  # else a write in place would get no gradient
                carrier = apply_function(_Carrier, input)
            known[casts.divided] = CastInput(input, casts, carrier)
        return known[casts.divided]

    def forget(self) -> None:
        """Free the casts and carriers; to be called after a layer's run."""
        self._known.clear()
        self._carriers.clear()


class _Carrier(torch.autograd.Function):
    """Autograd function from an input to its carrier, whose gradient it rounds to the input's dtype."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.dtype = input.dtype
        return carrier_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


def as_matrix(saved: Tensor, scale: Tensor) -> ScaledMatrix:
    """Return a saved tensor `[..., width]` in float8 as a matrix with its scales."""
    return ScaledMatrix(rows_of(saved), scale)
