"""Proof, before training, that a layer does not mix positions of a sequence, except in marked functions.

With context parallelism a rank has some positions of each sequence, so that a layer may treat each position
by itself only, or call a function marked by `plait.tensor.proof_marks`, such as attention. The proof
runs the layer on the meta device and follows, from operation to operation, which dim of each tensor contains
the positions:

    a tensor of the input            dim 1
    a result of an operation on it   by the rules of `position_operations`; refused where it mixes positions,
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

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ModelError
from plait.models.layers.layer_sequence import LayerSequence, without_values
from plait.models.layers.shape_inference import LayerInput, run_on_meta
from plait.proof.position_dims import PositionDim
from plait.proof.position_tracker import PositionTracker
from plait.tensor.layer_values import NamedLayer, Value, map_tensors, tensors_of
from plait.tensor.proof_marks import MarkedCall, call_begins, call_ends

SMALLEST_LENGTH = 5
"""Smaller primes divide too many sizes that a layer computes from others."""


@dataclass(frozen=True)
class DistinctiveSizes:
    """Two lengths and a number of rows: different primes that divide no other size of a layer."""

    lengths: tuple[int, int]
    """Up to the length of the given input where there are such primes, the largest first."""
    rows: int

    @staticmethod
    def of(path: str, module: nn.Module, like: Value) -> DistinctiveSizes:
        """Return sizes for the layer at `path` and an input like `like`.

        Raises ModelError unless all tensors in `like` with two or more dims have the same size in dim 1.
        """
        length, sizes = _length_of(path, like), set(_sizes(module, like))
        smaller = filter(_is_prime, range(length, SMALLEST_LENGTH - 1, -1))
        larger = filter(_is_prime, count(max(length + 1, SMALLEST_LENGTH)))
        first, second = islice(_without_multiples(chain(smaller, larger), sizes), 2)
        rows = next(_without_multiples(filter(_is_prime, count(3)), {first, second} | sizes))
        return DistinctiveSizes((first, second), rows)


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


def _length_of(path: str, like: Value) -> int:
    lengths = {tensor.shape[1] for tensor in tensors_of(like) if tensor.dim() > 1}
    if len(lengths) != 1:
        raise ModelError(
            f"layer {path!r} is given tensors of shapes {[list(one.shape) for one in tensors_of(like)]}, but "
            "context parallelism cuts dim 1, the sequence: give it tensors [rows, length, ...] that agree in "
            "length, or set plan.cp to 1."
        )
    return lengths.pop()


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


FROM_NUMBERS = frozenset({"as_tensor", "new_tensor", "tensor"})
"""Functions of torch that make tensors of numbers, without an operation that shows the numbers."""


def prove_positions_apart(layer: NamedLayer, like: Value) -> Value:
    """Return the layer's output on the meta device; raise ModelError where the layer mixes positions.

    `like` has the structure, dtypes and shapes of the layer's input; dim 1 of each tensor with two or more
    dims is the sequence. The run has another number of rows and another length, at most that of `like` where
    possible. So has the output, which can be given to the next layer. The rules of tensor parallelism must
    not be applied to `layer`, which is not changed.
    """
    sizes = DistinctiveSizes.of(layer.path, layer.module, like)
    first, second = sizes.lengths
    tracker, output = _run(layer, like, sizes.rows, first)
    if second < first:  # a longer sequence might be more than the layer allows
        other, _ = _run(layer, like, sizes.rows, second)
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
    """Within the context, give every operation to `tracker`, and every call of a marked function."""
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
        """Return the name of an operation, and of torch's function that calls it where that is another."""
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
