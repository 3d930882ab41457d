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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.models.layers.layer_sequence import LayerSequence, without_values
from plait.models.layers.shape_inference import LayerInput, run_on_meta
from plait.proof.distinctive_sizes import DistinctiveSizes, resized
from plait.proof.position_dims import PositionDim
from plait.proof.position_tracker import PositionTracker
from plait.tensor.layer_values import NamedLayer, Value, tensors_of
from plait.tensor.proof_marks import MarkedCall, call_begins, call_ends

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
