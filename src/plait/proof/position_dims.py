"""The dim of a tensor that contains the positions of a sequence, and operations that index along it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionDim:
    """The sequence dim of a tensor: it contains the positions of a sequence, perhaps merged with other dims.

    The dim has size `outer · length · inner`, and its index is `(o · length + position) · inner + i`.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> PositionDim:
        """Return this sequence dim as if it were dim number `dim`."""
        return PositionDim(dim, self.outer, self.inner)

    def without(self, dims: Iterable[int]) -> PositionDim | None:
        """Return the sequence dim after `dims` are removed from the tensor; None if it is one of them."""
        removed = set(dims)
        return None if self.dim in removed else self.at(self.dim - sum(dim < self.dim for dim in removed))

    def fits(self, shape: Sequence[int], length: int) -> bool:
        """Return whether a tensor of `shape` can have this sequence dim, for `length` positions."""
        return self.dim < len(shape) and shape[self.dim] == self.outer * length * self.inner

    def viewed(self, old: Sequence[int], new: Sequence[int], length: int) -> PositionDim | None:
        """Return the sequence dim after a view from shape `old` to `new`; None if no dim contains it."""
        step = self.inner * prod(old[self.dim + 1 :])  # from a position to the next, in row-major order
        below = 1
        for dim in reversed(range(len(new))):
            inner = step // below
            if step % below == 0 and new[dim] and new[dim] % (inner * length) == 0:
                return PositionDim(dim, new[dim] // (inner * length), inner)
            below *= new[dim]
        return None


@dataclass(frozen=True)
class OperationCall:
    """A call of an ATen operation, of which at least one argument has a sequence dimension."""

    name: str
    """Without the underscore of a variant that works in place."""
    arguments: Mapping[str, Any]
    """By the names in the operation's schema, with defaults."""
    result: tuple[int, ...]
    """The shape of the first tensor of the result."""
    length: int
    """The number of positions."""
    positions: Mapping[int, PositionDim]
    """Of each tensor with positions, by its `id`."""

    def of(self, name: str) -> PositionDim | None:
        """Return the sequence dim of the argument `name`; None where it is no tensor or has none."""
        return self.positions.get(id(self.arguments.get(name)))

    def tensor(self, name: str) -> Tensor:
        """Return the argument `name`, which is a tensor."""
        tensor = self.arguments[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def only(self, name: str) -> PositionDim | None:
        """Return the sequence dim of the argument `name`; None where another argument has one, too."""
        known = [one for one in tensors_among(self.arguments.values()) if id(one) in self.positions]
        return self.of(name) if len(known) == 1 else None

    def dims(self, name: str, count: int) -> list[int]:
        """Return the dims that the call's argument `name` lists, from 0, for a tensor of `count` dims."""
        given = self.arguments.get(name)
        return [dim % max(count, 1) for dim in ([given] if isinstance(given, int) else given or [])]

    def aligned(self, tensors: Iterable[Tensor], ndim: int) -> PositionDim | None:
        """Return the common sequence dim of `tensors` broadcast to `ndim` dims; None if they differ."""
        given = list(tensors)
        found = {
            (at.dim - tensor.dim(), at.outer, at.inner)
            for tensor in given
            if (at := self.positions.get(id(tensor))) is not None
        }
        if len(found) != 1:
            return None
        ((back, outer, inner),) = found
        for tensor in given:
            if id(tensor) not in self.positions and tensor.dim() >= -back and tensor.shape[back] != 1:
                return None
        return PositionDim(ndim + back, outer, inner)

    def repeats(self, tensor: Tensor, at: PositionDim, ndim: int) -> bool:
        """Return whether `tensor`, broadcast to `ndim` dims, has the sequence dim `at`, or size 1 there."""
        if id(tensor) in self.positions:
            return self.aligned([tensor], ndim) == at
        back = ndim - at.dim
        return tensor.dim() < back or tensor.shape[-back] == 1


def tensors_among(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation, which may be lists of tensors."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_among(argument)


def positions_by_size(shape: Sequence[int], length: int, rows: int) -> list[PositionDim]:
    """Return the dims of a tensor that could be its sequence dim, as `length` divides their size.

    The rest of such a dim is `rows` before the positions if `rows` divides it, and other dims behind them.
    """
    found = []
    for dim, size in enumerate(shape):
        if size and size % length == 0:
            rest = size // length
            outer = rows if rest % rows == 0 else 1
            found.append(PositionDim(dim, outer, rest // outer))
    return found


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
