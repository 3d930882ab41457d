"""The first run of a layer under recomputation, which keeps results, and the second, which reuses them.

Plait's linears pass their results through `FirstRun.result` and `SecondRun.result`. Products of others, and
attention in one call of torch, are seen by a `TorchDispatchMode`, which is slow: once a second run has used
none but those of attention, the mode is active for that call only. (Private by its path, it is documented in
"Extending PyTorch".) PyTorch's own selective checkpoints also keep the last result, which no backward needs,
and return results that were written to after the operation; here a result that is written to is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.autograd.kept_results import KEPT_OPERATIONS, Tensors
from plait.tensor.layer_values import map_tensors, tensors_of


class FirstRun:
    """Keeps results of a layer's forward: of `result`, and of operations that `RecordOperations` sees."""

    is_second = False
    has_results = False

    def __init__(self, most_results: int | None, most_operations: int | None, *, sees_all: bool) -> None:
        """`most_results`, `most_operations`: the maximum numbers of results to keep; None: all.

        `sees_all`: whether operations are seen in the whole layer, or only within `with_operations`.
        """
        self.most_results = most_results
        self.most_operations = most_operations
        self.sees_all = sees_all and most_operations != 0
        self.overwrites = False
        """Whether the layer has written to a kept result of an operation."""
        self.results: list[tuple[Tensors, list[int]] | None] = []
        """The results of `result`, and their versions: an in-place write increases them."""
        self.operations: list[Any] = []
        """Results of operations; None for one that is to be computed again."""
        self.paused = False
        """Within `result`: what is computed there is not kept by itself."""
        self.active = False

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()` and keep it, but no result of an operation within."""
        if self.paused:
            return compute()
        self.paused = True
        try:
            made = compute()
        finally:
            self.paused = False
        if self.most_results is None or len(self.results) < self.most_results:
            # Without its graph, which would keep the activations alive.
            tensors = tuple([None if one is None else one.detach() for one in made])
            self.results.append((tensors, versions_of(tensors)))
        return made

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, and keep the results of operations within."""
        if self.paused or self.sees_all or self.most_operations == 0:
            return compute()
        with RecordOperations(self):
            return compute()

    def finish(self) -> None:
        """End the run, and free kept results that an in-place operation has overwritten since."""
        self.active = False
        for number, entry in enumerate(self.results):
            if entry is not None and versions_of(entry[0]) != entry[1]:
                self.results[number] = None

    def keep_nothing(self) -> None:
        """Free all kept results, and keep none from now on."""
        self.results.clear()
        self.operations.clear()
        self.most_results = self.most_operations = 0


class SecondRun:
    """Reuses the results that a `FirstRun` has kept: each once, in the order of the calls."""

    is_second = True

    def __init__(self, first: FirstRun) -> None:
        self._first = first
        self.used_results = 0
        self.used_operations = 0
        self.needs_all = first.overwrites
        """Whether kept operations outside of `with_operations` are used, or written to."""
        self.sees_all = first.sees_all and bool(first.operations)
        """Whether operations are seen in the whole layer."""
        self.paused = False
        self._within = False
        if first.active:  # the layer runs again within its first run: results cannot be numbered
            first.keep_nothing()

    @property
    def has_results(self) -> bool:
        """Whether the next result was kept, and has not been written to."""
        return self._found() is not None

    def _found(self) -> Tensors | None:
        results = self._first.results
        entry = results[self.used_results] if self.used_results < len(results) else None
        return entry[0] if entry is not None and versions_of(entry[0]) == entry[1] else None

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return and remove the next result that the first run kept; compute it if none is left."""
        if self.paused:
            return compute()
        found = self._found()
        if self.used_results < len(self._first.results):
            self._first.results[self.used_results] = None
        self.used_results += 1
        if found is not None:
            return found
        self.paused = True
        try:
            return compute()
        finally:
            self.paused = False

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, and reuse the results of operations within."""
        if self.paused or not self._first.operations:
            return compute()
        self._within = True
        try:
            with nullcontext() if self.sees_all else ReplayOperations(self):
                return compute()
        finally:
            self._within = False

    def operation(self, compute: Callable[[], Any]) -> Any:
        """Return and remove the next kept result of an operation; compute it if none is left."""
        operations, found = self._first.operations, None
        if self.used_operations < len(operations):
            found, operations[self.used_operations] = operations[self.used_operations], None
        self.used_operations += 1
        self.needs_all |= not self._within
        return compute() if found is None else found


class RecordOperations(TorchDispatchMode):
    """Context that keeps the results of matrix products, convolutions and attention in a `FirstRun`."""

    def __init__(self, run: FirstRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func` and keep its result; discard kept results that it writes to."""
        run = self._run
        for tensor in _written(func, args, kwargs or {}):
            self._drop(tensor)
        result = func(*args, **(kwargs or {}))
        if _is_cached(func) and not run.paused:
            keeps = run.most_operations is None or len(run.operations) < run.most_operations
            run.operations.append(map_tensors(Tensor.detach, result) if keeps else None)
        return result

    def _drop(self, written: Tensor) -> None:
        """Discard the kept results of operations that share memory with a written tensor."""
        storage = written.untyped_storage()
        for number, result in enumerate(self._run.operations):
            if any(tensor.untyped_storage() is storage for tensor in tensors_of(result)):
                self._run.operations[number] = None
                self._run.overwrites = True


class ReplayOperations(TorchDispatchMode):
    """Context that returns the results of operations that the first run has kept."""

    def __init__(self, run: SecondRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the kept result of `func`; run `func` where none is kept."""
        if _is_cached(func) and not self._run.paused:
            return self._run.operation(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def versions_of(tensors: Tensors) -> list[int]:
    """Return the version counters of tensors, which each in-place write increases."""
    return [-1 if tensor is None else tensor._version for tensor in tensors]


def _is_cached(operation: Any) -> bool:
    return operation.namespace == "aten" and operation.overloadpacket.__name__ in KEPT_OPERATIONS


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    if operation.namespace == "c10d":  # collectives write to their arguments; their schema does not say so
        yield from tensors_of(args)
    schema = operation._schema
    if schema.is_mutable:
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from tensors_of(given)
