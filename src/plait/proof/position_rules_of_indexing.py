"""Where the sequence dim is in results of operations that index: gather, scatter, `tensor[indices]` …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.proof.position_dims import OperationCall, PositionDim

MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Selection:
    """How `tensor[indices]` moves dims: those that it indexes, and where the others are in its result."""

    dims: Sequence[int]
    """The dims that are indexed; a mask indexes as many as it has."""
    index_ndim: int
    """The number of dims of the indices after broadcasting, which replace the indexed ones."""

    @classmethod
    def of(cls, indices: Sequence[Tensor | None]) -> Selection:
        """Return the selection that `tensor[indices]` makes: by numbers, masks, and None for all of a dim."""
        dims, ndims, dim = list[int](), list[int](), 0
        for index in indices:
            is_mask = index is not None and index.dtype in MASKS
            width = index.dim() if index is not None and is_mask else 1
            if index is not None:
                dims += range(dim, dim + width)
                ndims.append(1 if is_mask else index.dim())
            dim += width
        return cls(dims, max(ndims))

    @property
    def first(self) -> int:
        """Return the first of the result's dims that come from the indices."""
        is_one_block = self.dims[-1] - self.dims[0] == len(self.dims) - 1
        return self.dims[0] if is_one_block else 0

    def of_others(self, at: PositionDim) -> PositionDim | None:
        """Return where the tensor's sequence dim `at` is in the result; None where `at` itself is indexed."""
        other = at.without(self.dims)
        return other if other is None or other.dim < self.first else at.at(other.dim + self.index_ndim)

    def ndim(self, before: int) -> int:
        """Return the number of dims of the result for a tensor with `before` dims."""
        return before - len(self.dims) + self.index_ndim


def indexed_along(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of `gather`'s or `scatter`'s result, or None where positions are mixed."""
    at, index = call.of("self"), call.of("index")
    (dim,) = call.dims("dim", call.tensor("self").dim())
    if at is None:  # a table that is read, and may be larger than the index along other dims
        return index if call.name == "gather" and index is not None and index.dim == dim else None
    source = call.arguments.get("src")
    same = index == at and (not isinstance(source, Tensor) or call.of("src") == at)
    return at if same and at.dim != dim else None


def selected(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of the result of `index_select`, or None where positions are mixed."""
    at, index = call.of("self"), call.of("index")
    (dim,) = call.dims("dim", call.tensor("self").dim())
    if at is None:
        return None if index is None else index.at(dim)
    return at if index is None and at.dim != dim else None


def written_along(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of the result of `index_add` and the like, or None where positions are mixed.

    For `index_add`, `index_copy`, `index_fill` and `index_reduce`.
    """
    at, count = call.of("self"), call.tensor("self").dim()
    (dim,) = call.dims("dim", count)
    source = call.arguments.get("source", call.arguments.get("value"))
    if at is None or at.dim == dim or call.of("index") is not None:
        return None
    return at if not isinstance(source, Tensor) or call.repeats(source, at, count) else None


def part_replaced(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of `select_scatter`'s or `slice_scatter`'s result; None if positions mix."""
    at, (dim,) = call.of("self"), call.dims("dim", call.tensor("self").dim())
    if at is None or at.dim == dim:
        return None
    removed = call.name == "select_scatter" and dim < at.dim
    return at if call.of("src") == at.at(at.dim - removed) else None


def indexed(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of `self[indices]` (numbers, masks, None for all), or None where unclear."""
    at, given = call.of("self"), call.arguments["indices"]
    indices: list[Tensor] = [index for index in given if index is not None]
    has_positions = any(id(index) in call.positions for index in indices)
    if _has_scalar_mask(indices) or (has_positions and any(index.dtype in MASKS for index in indices)):
        return None
    selection = Selection.of(given)
    if at is None:
        found = call.aligned(indices, selection.index_ndim)
        return None if found is None else found.at(found.dim + selection.first)
    return None if has_positions else selection.of_others(at)


def written_at(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of `index_put`'s result, or None where `indices` mix positions."""
    at, values, given = call.of("self"), call.tensor("values"), call.arguments["indices"]
    indices: list[Tensor] = [index for index in given if index is not None]
    if at is None or _has_scalar_mask(indices):
        return None
    selection = Selection.of(given)
    ndim = selection.ndim(call.tensor("self").dim())
    if not any(id(index) in call.positions for index in indices):
        others = selection.of_others(at)
        return at if others is not None and call.repeats(values, others, ndim) else None
    # The same values are written wherever a mask over the positions is true.
    mask, first = indices[0], selection.first
    over = call.positions.get(id(mask))
    is_mask = len(indices) == 1 and mask.dtype in MASKS
    is_over_positions = over is not None and over.at(over.dim + first) == at
    same = id(values) not in call.positions and call.repeats(values, PositionDim(first), ndim)
    return at if is_mask and is_over_positions and same else None


def _has_scalar_mask(indices: Sequence[Tensor]) -> bool:
    """Return whether an index is a 0-d boolean tensor, with which `tensor[index]` has one dim more."""
    return any(index.dtype in MASKS and not index.dim() for index in indices)
