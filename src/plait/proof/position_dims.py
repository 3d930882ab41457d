"""`PositionDim`: the dim of a tensor that contains the positions of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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
