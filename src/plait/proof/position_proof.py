"""Proof, before training, that a layer does not mix positions of a sequence, except in marked functions.

With context parallelism a rank has some positions of each sequence, so that a layer may treat each position
by itself only, or call a function marked by `plait.tensor.position_marks`, such as attention. The proof
runs the layer on the meta device and follows, from operation to operation, which dim of each tensor contains
the positions:

    a tensor of the input            dim 1
    a result of an operation on it   by the rules of `position_rules`; refused where it mixes positions,
                                     and where no rule is known
    a result of a marked function    as the mark says
    a uniform tensor (zeros, ones)   the dim whose size is a multiple of the length
    any other tensor                 has no positions; refused where a dim's size is a multiple of the length,
                                     as that of `torch.arange(length)` or `table[:length]`

The length of the run is a prime that divides no size of the layer, so sizes that are multiples of the length
come from it. A second run with another length finds other numbers and sizes that depend on the length, such
as `length**-0.5`. Not found is what the layer's own code does for certain lengths only. Not looked at are
random numbers, and whether rows of the batch are mixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ModelError
from plait.models.layers.layer_sequence import LayerSequence, without_values
from plait.models.layers.shape_inference import LayerInput, run_on_meta
from plait.proof.position_dims import OperationCall, PositionDim, positions_by_size, tensors_among
from plait.proof.position_rules import REPEATED, SHAPE_IN_PLACE, UNIFORM, Rule, rule_of
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.position_marks import MarkedCall, call_begins, call_ends

SMALLEST_LENGTH = 5
"""Smaller primes divide too many sizes that a layer computes from others."""
FROM_NUMBERS = frozenset({"as_tensor", "new_tensor", "tensor"})
"""Functions of torch that make tensors of numbers, without an operation that shows the numbers."""
SIZES = frozenset({"size", "split_sizes", "repeats", "stride", "N", "HxW"})
"""Arguments of ATen operations that are sizes: those of results are compared instead."""
SLICES = frozenset({"slice", "slice_scatter"})
SOME_POSITIONS = "with context parallelism a rank has some of the positions"


def distinctive_sizes(path: str, module: nn.Module, like: Value) -> tuple[int, int, int]:
    """Return two lengths and a row count to run a layer with: primes that divide no other size in it.

    The lengths are up to that of the input `like` where there are such primes, the largest first. Raises
    ModelError unless all tensors in `like` with two or more dims have the same size in dim 1.
    """
    lengths = {tensor.shape[1] for tensor in tensors_of(like) if tensor.dim() > 1}
    if len(lengths) != 1:
        raise ModelError(
            f"layer {path!r} is given tensors of shapes {[list(one.shape) for one in tensors_of(like)]}, but "
            "context parallelism cuts dim 1, the sequence: give it tensors [rows, length, ...] that agree in "
            "length, or set plan.cp to 1."
        )
    (length,), sizes = lengths, set(_sizes(module, like))
    smaller = filter(_is_prime, range(length, SMALLEST_LENGTH - 1, -1))
    larger = filter(_is_prime, count(max(length + 1, SMALLEST_LENGTH)))
    first, second = islice(_without_multiples(chain(smaller, larger), sizes), 2)
    rows = next(_without_multiples(filter(_is_prime, count(3)), {first, second} | sizes))
    return first, second, rows


def resized(like: Value, rows: int, length: int) -> Value:
    """Return leaves on the meta device with the structure and dtypes of `like` and other sizes.

    Dim 1 is `length`; dim 0 is `rows`, unless it is smaller than that of another tensor, as 1 may be.
    """
    most = max((tensor.shape[0] for tensor in tensors_of(like) if tensor.dim()), default=0)

    def empty(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == most:
            shape[0] = rows
        if len(shape) > 1:
            shape[1] = length
        learns = tensor.is_floating_point()
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=learns)

    return map_tensors(empty, like)


def _sizes(module: nn.Module, like: Value) -> Iterator[int]:
    """Yield sizes in a layer: of its tensors, in its attributes, and of its input behind the sequence."""
    for tensor in tensors_of(like):
        yield from tensor.shape[2:]
    for child in module.modules():
        for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
            yield from tensor.shape
        for value in vars(child).values():
            if isinstance(value, Tensor):
                yield from value.shape
            elif isinstance(value, int | tuple | list):
                numbers = (value,) if isinstance(value, int) else value
                yield from (number for number in numbers if isinstance(number, int))


def _without_multiples(primes: Iterator[int], sizes: Collection[int]) -> Iterator[int]:
    """Yield those of `primes` that divide none of `sizes`."""
    return (prime for prime in primes if all(size % prime for size in sizes if size))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def prove_positions_apart(layer: NamedLayer, like: Value) -> Value:
    """Return the layer's output on the meta device; raise ModelError where the layer mixes positions.

    `like` has the structure, dtypes and shapes of the layer's input; dim 1 of each tensor with two or more
    dims is the sequence. The run has another number of rows and another length, at most that of `like` where
    possible. So has the output, which can be given to the next layer. The rules of tensor parallelism must
    not be applied to `layer`, which is not changed.
    """
    first, second, rows = distinctive_sizes(layer.path, layer.module, like)
    tracker, output = _run(layer, like, rows, first)
    if second < first:  # a longer sequence might be more than the layer allows
        other, _ = _run(layer, like, rows, second)
        tracker.require_same_constants(other)
    return output


def _run(layer: NamedLayer, like: Value, rows: int, length: int) -> tuple[PositionTracker, Value]:
    """Run a copy of the layer on the meta device; return the tracker of this run, and the output."""
    parameters = dict(layer.module.named_parameters())
    (copy,) = without_values(LayerSequence((layer,), parameters, {})).layers
    value, tracker = resized(like, rows, length), PositionTracker(layer.path, rows, length)
    for tensor in tensors_of(value):
        if tensor.dim() > 1:
            tracker.follow(tensor, PositionDim(1))
    with tracking(tracker):
        run, _ = run_on_meta(copy, LayerInput(value), "with plan.cp above 1, which needs other lengths, ")
    tracker.require_output(run.output.value)
    return tracker, run.output.value


@contextmanager
def tracking(tracker: PositionTracker) -> Iterator[None]:
    """Context: report each operation, and each call of a marked function, to `tracker`."""
    functions = _Functions(tracker)
    with functions, _Operations(functions):
        yield


class _Functions(TorchFunctionMode):
    """Reports calls of marked functions, and numbers given to torch's functions, to the tracker."""

    def __init__(self, tracker: PositionTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.marked = 0
        """The number of marked functions that run, one in the other."""
        self._name = ""  # of torch's function that runs

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the result of `func`."""
        if func is call_begins or func is call_ends:
            return self._note(func, args[0])
        outer, self._name = self._name, getattr(func, "__name__", "")
        try:
            if self._name in FROM_NUMBERS and not self.marked:
                self.tracker.record_numbers(self._name, args)
            return func(*args, **(kwargs or {}))
        finally:
            self._name = outer

    def _note(self, begins_or_ends: Callable[[MarkedCall], None], call: MarkedCall) -> None:
        self.marked += 1 if begins_or_ends is call_begins else -1
        if self.marked == 1 and begins_or_ends is call_begins:
            self.tracker.require_arguments(call)
        elif self.marked == 0:
            self.tracker.follow_result(call)

    def place(self, operation: Any) -> str:
        """Return the name of an operation, with that of the torch function that calls it, for errors."""
        name, function = str(operation.overloadpacket), self._name
        is_same = function.rstrip("_") == name.partition(".")[2].rstrip("_")
        return name if is_same or not function or function.startswith("_") else f"{name} of {function}"


class _Operations(TorchDispatchMode):
    """Gives each operation to the tracker, except those in marked functions."""

    def __init__(self, functions: _Functions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the result of `func`."""
        functions, kwargs = self._functions, kwargs or {}
        if functions.marked:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # else composite operations arrive in parts
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        functions.tracker.visit(func, args, kwargs, result, functions.place(func))
        return result


class PositionTracker:
    """Tracks which dim is the sequence dim through the operations of a layer's run on the meta device."""

    def __init__(self, path: str, rows: int, length: int) -> None:
        """`path` is the layer's; `rows` and `length` are the sizes of dims 0 and 1 of its input."""
        self._path, self._rows, self._length = path, rows, length
        self._positions: dict[int, PositionDim] = {}  # by the `id` of a tensor
        self._followed: list[Tensor] = []  # kept, so that no other tensor gets the `id` of one of them
        self.constants: list[tuple[str, object]] = []
        """What must not depend on the length: numbers and sizes in each call, after the place of the call."""
        self._error: ModelError | None = None  # the first one: a layer might catch it

    def follow(self, tensor: Tensor, at: PositionDim) -> None:
        """Set the sequence dim of a tensor."""
        self._positions[id(tensor)] = at
        self._followed.append(tensor)

    def of(self, tensor: Tensor) -> PositionDim | None:
        """Return the sequence dim of a tensor, or None."""
        return self._positions.get(id(tensor))

    def visit(
        self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, place: str
    ) -> None:
        """Set the sequence dims of an operation's results. Raises ModelError if it mixes positions.

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
        """Raise ModelError unless arguments of a marked function have the sequence dim of its mark."""
        if call.mark.dim is None or not call.mark.arguments:
            return
        given = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
        for name in call.mark.arguments:
            if isinstance(tensor := given.get(name), Tensor):
                self._require(tensor, call.mark.dim, f"gives {call.function.__name__} as {name}")

    def follow_result(self, call: MarkedCall) -> None:
        """Set which dim of a marked function's result is the sequence, by its mark or else by its size."""
        at = None if call.mark.dim is None else PositionDim(call.mark.dim)
        if call.mark.like is not None:
            given = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
            at = self.of(given[call.mark.like])
        for tensor in tensors_of(call.result):
            if at is not None and at.fits(tensor.shape, self._length):
                self.follow(tensor, at)
            else:
                self._follow_by_size(tensor, call.function.__name__)

    def record_numbers(self, place: str, arguments: Iterable[Any]) -> None:
        """Record the numbers among a call's arguments, which must not depend on the sequence length."""
        numbers: list[object] = []
        for argument in arguments:
            if isinstance(argument, list | tuple):
                self.record_numbers(place, argument)
            elif isinstance(argument, int | float | complex):
                numbers.append(argument)
        if numbers:
            self.constants.append((place, repr(numbers)))  # as text: NaN differs from itself

    def require_output(self, output: Value) -> None:
        """Raise an error that the layer caught, or ModelError unless dim 1 of outputs is the sequence."""
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
    """Return the arguments of a call of an ATen operation by their names, with defaults.

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
