"""Tracks which dims of the tensors in a run of a layer contain positions of a sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.proof.position_dims import OperationCall, PositionDim, positions_by_size, tensors_among
from plait.proof.position_operations import REPEATED, SHAPE_IN_PLACE, UNIFORM, Rule, rule_of
from plait.tensor.layer_values import Value, tensors_of
from plait.tensor.proof_marks import MarkedCall

SIZES = frozenset({"size", "split_sizes", "repeats", "stride", "N", "HxW"})
"""Arguments of aten operations that are sizes: those of results are compared instead."""
SLICES = frozenset({"slice", "slice_scatter"})
SOME_POSITIONS = "with context parallelism a rank has some of the positions"


class PositionTracker:
    """Follows positions through the operations of one run of a layer on the meta device."""

    def __init__(self, path: str, rows: int, length: int) -> None:
        """`path` is the layer's; `rows` and `length` are the sizes of dims 0 and 1 of its input."""
        self._path, self._rows, self._length = path, rows, length
        self._positions: dict[int, PositionDim] = {}  # by the `id` of a tensor
        self._followed: list[Tensor] = []  # kept, so that no other tensor gets the `id` of one of them
        self.constants: list[tuple[str, object]] = []
        """What must not depend on the length: numbers and sizes in each call, after the place of the call."""
        self._error: ModelError | None = None  # the first one: a layer might catch it

    def follow(self, tensor: Tensor, at: PositionDim) -> None:
        """Set the positions in a tensor."""
        self._positions[id(tensor)] = at
        self._followed.append(tensor)

    def of(self, tensor: Tensor) -> PositionDim | None:
        """Return the positions in a tensor, or None."""
        return self._positions.get(id(tensor))

    def visit(
        self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, place: str
    ) -> None:
        """Set the positions in the results of an operation. Raises ModelError where it mixes positions.

        `place` names the operation in errors.
        """
        name, results = _name_of(operation), list(tensors_among([result]))
        given = list(tensors_among((*args, *kwargs.values())))
        others = [tensor for tensor in given if self.of(tensor) is None]
        is_pointwise = torch.Tag.pointwise in operation.tags
        arguments = arguments_of(operation, args, kwargs)
        self.record_numbers(place, self._numbers(name, arguments))
        if any(map(self._by_size, others)):
            raise self._own_positions(place)
        if name in UNIFORM or (name in REPEATED and len(others) == len(given)):
            for tensor in results:
                self._follow_by_size(tensor, place)
        elif len(others) < len(given):
            rule = rule_of(name, is_pointwise=is_pointwise) if operation.namespace == "aten" else None
            self._apply(rule, name, arguments, results, place)
        elif any(map(self._by_size, results)):
            raise self._own_positions(place)
        self.constants.append((place, [self._other_sizes(tensor) for tensor in results]))

    def _numbers(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of an operation that must not depend on the length: all numbers but sizes."""
        if name not in SLICES:
            return [one for argument, one in arguments.items() if argument not in SIZES]
        tensor, dim = arguments["self"], arguments["dim"] % arguments["self"].dim()
        at, size = self.of(tensor), tensor.shape[dim]
        if at is not None and at.dim == dim:  # all of the positions, by the rule
            return []
        start, end, step = (arguments[one] for one in ("start", "end", "step"))
        return [dim, *slice(start, end, step).indices(size)]

    def _apply(
        self, rule: Rule | None, name: str, arguments: dict[str, Any], results: list[Tensor], place: str
    ) -> None:
        if rule is None:
            raise self._refused(
                f"applies {place} to positions of the sequence, and whether that mixes them is unknown: use "
                "other operations or plait.attention, or set plan.cp to 1"
            )
        shape = tuple(results[0].shape) if results else ()
        at = rule(OperationCall(name, arguments, shape, self._length, self._positions))
        if at is None or not results or not at.fits(shape, self._length):
            raise self._mixes(place)
        for tensor in results:  # some operations return statistics of another shape as well
            if at.fits(tensor.shape, self._length):
                self.follow(tensor, at)
            elif self._by_size(tensor):
                raise self._mixes(place)

    def require_arguments(self, call: MarkedCall) -> None:
        """Raise ModelError unless the arguments of a marked function have positions as its mark says."""
        if call.mark.dim is None or not call.mark.arguments:
            return
        given = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
        for name in call.mark.arguments:
            if isinstance(tensor := given.get(name), Tensor):
                self._require(tensor, call.mark.dim, f"gives {call.function.__name__} as {name}")

    def follow_result(self, call: MarkedCall) -> None:
        """Set the positions in the result of a marked function."""
        for tensor in tensors_of(call.result):
            at = None if call.mark.dim is None else PositionDim(call.mark.dim)
            if at is not None and at.fits(tensor.shape, self._length):
                self.follow(tensor, at)
            else:
                self._follow_by_size(tensor, call.function.__name__)

    def record_numbers(self, place: str, arguments: Iterable[Any]) -> None:
        """Record the numbers among the arguments of a call, for `require_same_constants`."""
        numbers: list[object] = []
        for argument in arguments:
            if isinstance(argument, list | tuple):
                self.record_numbers(place, argument)
            elif isinstance(argument, int | float | complex):
                numbers.append(argument)
        if numbers:
            self.constants.append((place, repr(numbers)))  # as text: NaN differs from itself

    def require_output(self, output: Value) -> None:
        """Raise the first error that the layer caught; ModelError unless dim 1 of outputs is the sequence."""
        if self._error is not None:
            raise self._error
        for tensor in tensors_of(output):
            if tensor.dim() > 1:
                self._require(tensor, 1, "returns")
            elif self.of(tensor) is not None:
                raise self._refused(
                    f"returns a tensor of shape {list(tensor.shape)} with positions of the sequence in dim "
                    "0, which is for rows: return [rows, length, ...], or set plan.cp to 1"
                )

    def require_same_constants(self, other: PositionTracker) -> None:
        """Raise ModelError unless numbers and sizes were the same in a run with another length."""
        for one, two in zip_longest(self.constants, other.constants):
            if one != two:
                place, _ = one or two
                raise self._refused(
                    f"computes with a number that depends on the length of the sequence at {place}, but "
                    f"{SOME_POSITIONS}: compute with a constant, or set plan.cp to 1"
                )

    def _require(self, tensor: Tensor, dim: int, does: str) -> None:
        """Raise ModelError unless a tensor has the positions in dim `dim`."""
        if self.of(tensor) != PositionDim(dim):
            raise self._refused(
                f"{does} a tensor of shape {list(tensor.shape)} whose dim {dim} is not the sequence (here of "
                f"length {self._length}): permute or reshape that tensor, or set plan.cp to 1"
            )

    def _by_size(self, tensor: Tensor) -> list[PositionDim]:
        return positions_by_size(tensor.shape, self._length, self._rows)

    def _other_sizes(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor without the positions."""
        at = self.of(tensor)
        if at is None:
            return tuple(tensor.shape)
        return *tensor.shape[: at.dim], at.outer, at.inner, *tensor.shape[at.dim + 1 :]

    def _follow_by_size(self, tensor: Tensor, place: str) -> None:
        found = self._by_size(tensor)
        if len(found) > 1:
            raise self._mixes(place)
        for at in found:
            self.follow(tensor, at)

    def _mixes(self, place: str) -> ModelError:
        return self._refused(
            f"mixes positions of the sequence at {place}, which context parallelism cuts: use "
            "plait.attention, or set plan.cp to 1"
        )

    def _own_positions(self, place: str) -> ModelError:
        return self._refused(
            f"numbers the positions of the sequence by itself at {place}, but {SOME_POSITIONS}: use "
            "plait.positions, or set plan.cp to 1"
        )

    def _refused(self, fault: str) -> ModelError:
        error = ModelError(f"layer {self._path!r} {fault}.")
        self._error = self._error or error
        return error


def arguments_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an aten operation by their names, with defaults.

    `_schema` is private: torch has no public way to the names.
    """
    return {
        one.name: args[number] if number < len(args) else kwargs.get(one.name, one.default_value)
        for number, one in enumerate(operation._schema.arguments)
    }


def _name_of(operation: Any) -> str:
    """Return the name of an operation, without the underscore of a variant that works in place."""
    name: str = operation.overloadpacket.__name__
    return name if name.startswith("__") or name in SHAPE_IN_PLACE else name.rstrip("_")
