"""Activation recomputation: a layer's saved tensors are computed again from its input for the backward.

    none        everything that autograd saves stays until the backward
    selective   matrix products and attention stay; the cheap rest (norms, activations) is recomputed
    full        only the layer's input stays

With `selective` and `full` a layer runs once more, inside `I`, and only up to the last tensor that its
backward needs, so its last product is not computed again. Random numbers are those of the first run.
(Korthikanti et al. 2022, arXiv:2205.05198, section 5, recompute attention and keep the rest; here it is the
other way round, since a fused attention keeps next to nothing.)

`torch.utils.checkpoint` does the same for any function, and takes several times as long for a small layer.
Here hooks of saved tensors count what the first run saves, and collect it in the second. What stays in memory
anyway, the layer's input and its parameters, they leave to autograd: a layer that saves nothing else, such as
an embedding or a linear, does not run again.

Plait's linears give their results to `KeepingRun.result` and take them from `ReplayedRun.result`. Products of
others, and attention in one call of torch, are seen by a `TorchDispatchMode`, which is slow: once a second
run has used none but those of attention, the mode is active for that call only. (Private by its path, it is
documented in "Extending PyTorch".) PyTorch's own selective checkpoints also keep the last result, which no
backward needs, and return results that were written to after the operation; here a result that is written to
is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ModelError
from plait.plan.plan import Recompute
from plait.ranks.accelerator import random_state, set_random_state
from plait.tensor.autograd.kept_results import KEPT_OPERATIONS, RECOMPUTED_RUN, Tensors
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors, tensors_of

T = TypeVar("T")


class KeepingRun:
    """The first run of a recomputed layer, in the forward: keeps results that the second run reuses."""

    is_second = False
    output_is_read = True
    has_results = False

    def __init__(self, layer: RecomputingLayer) -> None:
        self.most_results, self.most_operations = layer.most_results, layer.most_operations
        self.sees_all = layer.sees_all and layer.most_operations != 0
        self.overwrites = False
        """Whether the layer has written to a kept result of an operation."""
        self.results: list[tuple[Tensors, list[int]] | None] = []
        """The results of `result`, and their versions: an in-place write increases them."""
        self.operations: list[Any] = []
        """Results of operations; None for one that is to be computed again."""
        self.decisions: list[Any] = []
        """The results of `once`, which the second run reuses in every mode."""
        self.paused = False
        """Within `result`: what is computed there is not kept by itself."""
        self.active = False

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()`, and keep its tensors for the second run, but no results of operations within.

        Not kept are those within another `result`, nor those beyond `most_results`.
        """
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
        """Return `compute()`, and keep for the second run its matrix products, convolutions and attention."""
        if self.paused or self.sees_all or self.most_operations == 0:
            return compute()
        with RecordOperations(self):
            return compute()

    def once(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, and keep it for the second run in every recompute mode."""
        made = compute()
        self.decisions.append(made)
        return made

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


class ReplayedRun:
    """The second run of a recomputed layer, in the backward: reuses results that the first one kept."""

    is_second = True
    output_is_read = True

    def __init__(self, first: KeepingRun) -> None:
        self._first = first
        self.used_results = 0
        self.used_operations = 0
        self._used_decisions = 0
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
        """Whether the first run kept the next result, and nothing has written to it since."""
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

    def once(self, compute: Callable[[], T]) -> T:
        """Return the next value that `once` kept in the first run; `compute()` if none is left.

        Also where the first run is still active, as in a layer that runs itself.
        """
        if self._first.active or self._used_decisions == len(self._first.decisions):
            return compute()
        self._used_decisions += 1
        found: T = self._first.decisions[self._used_decisions - 1]
        return found

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, in which operations return the results that the first run has kept."""
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
    """Context that keeps the results of matrix products, convolutions and attention in a `KeepingRun`."""

    def __init__(self, run: KeepingRun) -> None:
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

    def __init__(self, run: ReplayedRun) -> None:
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


Run = Callable[..., Value]


def recomputing(
    mode: Recompute, run: Run, parameters: Sequence[Tensor] = (), *, decides: bool = False
) -> Run:
    """Return `run` with a backward that recomputes as `mode` specifies; call it with gradients enabled.

    The arguments of a call must not change until its backward. `parameters`: those of the layer. `decides`:
    whether it calls `computed_once`, whose results are kept in every mode.
    """
    if mode == "none":
        return run
    return RecomputingLayer(run, parameters, keeps_results=mode == "selective", decides=decides)


class RecomputingLayer:
    """A layer's forward with recomputation; learns from each backward how many results are worth keeping."""

    def __init__(
        self, run: Run, parameters: Sequence[Tensor] = (), *, keeps_results: bool, decides: bool = False
    ) -> None:
        self.run = run
        self.parameters = parameters
        self.keeps_results = keeps_results
        self.keeps_any = keeps_results or decides
        self.most_results: int | None = None if keeps_results else 0
        """Results of `kept` that a second run has used, and a first run keeps; before that None: all."""
        self.most_operations: int | None = None if keeps_results else 0
        """Results of other operations that a second run has used, likewise."""
        self.sees_all = keeps_results
        """Whether other operations are seen in the whole layer, or only within `with_kept_operations`."""

    def __call__(self, *arguments: Any) -> Value:
        """Return `run(*arguments)`, whose autograd graph keeps the arguments instead of saved tensors.

        The last argument is the layer's input.
        """
        call = _RecomputingCall(self, arguments)
        with saved_tensors_hooks(call.pack, call.unpack):
            return call.run_first() if self.keeps_any else self.run(*arguments)

    def note_no_second_run(self) -> None:
        """Record that this run is not recomputed: later ones keep only what recomputations have used."""
        self.sees_all = False
        self.most_results, self.most_operations = self.most_results or 0, self.most_operations or 0

    def note(self, second: ReplayedRun) -> None:
        """Let later forwards keep no more results than the recomputation `second` has used."""
        if self.keeps_results:
            self.sees_all = second.needs_all or (self.sees_all and self.most_operations is not None)
            self.most_results = max(self.most_results or 0, second.used_results)
            self.most_operations = max(self.most_operations or 0, second.used_operations)


class _AllSaved(BaseException):
    """Raised to end a second run that has saved all it must; no `Exception`, which a layer could catch."""


class _RecomputingCall:
    """One call of a layer, with hooks that pack saved tensors as numbers and recompute them at unpacking."""

    def __init__(self, layer: RecomputingLayer, arguments: tuple[Any, ...]) -> None:
        self._layer, self._arguments = layer, arguments
        self._saved: dict[int, Tensor] = {}
        """By number, what a second run has saved and the backward has not read yet."""
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        """Of the tensors that the first run has saved, but those that are held anyway."""
        tensors = [*list_of_tensors(arguments[-1]), *layer.parameters]
        self._held = {id(one.untyped_storage()) for one in tensors if one.layout == torch.strided}
        """The storages of the layer's input and parameters."""
        self._random_state = random_state()
        self._first = KeepingRun(layer)

    def pack(self, tensor: Tensor) -> int | Tensor:
        """Return what autograd stores for a saved tensor: an index, or the tensor if it is held anyway."""
        if tensor.layout == torch.strided and id(tensor.untyped_storage()) in self._held:
            return tensor.detach()
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def unpack(self, number: int | Tensor) -> Tensor:
        """Return the saved tensor of an index, which is freed; run the layer again where it is not there."""
        if isinstance(number, Tensor):
            return number
        if number not in self._saved:
            self._run_again()
        found, (shape, dtype) = self._saved.pop(number, None), self._kinds[number]
        if found is None or found.shape != shape or found.dtype != dtype:
            given = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ModelError(
                f"a layer that is recomputed saved {dtype} {list(shape)} for its backward, and {given} when "
                "it ran again: its forward must do the same each time."
            )
        return found

    def run_first(self) -> Value:
        """Run the layer in the forward, and keep results that its second run will reuse."""
        first = self._first
        # Plait's own linears and attention keep their results by themselves.
        first.active = True
        others = RecordOperations(first) if first.sees_all else nullcontext()
        token = RECOMPUTED_RUN.set(first)
        try:
            with others:
                output = self._layer.run(*self._arguments)
        finally:
            RECOMPUTED_RUN.reset(token)
            first.finish()
        if not self._kinds:
            first.keep_nothing()
            self._layer.note_no_second_run()
        return output

    def _run_again(self) -> None:
        """Run the layer with the first run's random numbers, up to the last tensor that was saved there."""
        layer, second, before = self._layer, ReplayedRun(self._first), random_state()
        others = ReplayOperations(second) if second.sees_all else nullcontext()
        saved: list[Tensor] = []

        def save(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and id(tensor.untyped_storage()) in self._held:
                return tensor
            saved.append(tensor.detach())  # without its graph, which would hold itself by this hook
            if len(saved) == len(self._kinds):
                raise _AllSaved
            return saved[-1]

        token = RECOMPUTED_RUN.set(second)
        set_random_state(self._random_state)
        try:
            with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor), others:
                layer.run(*self._arguments)
        except _AllSaved:
            pass
        finally:
            set_random_state(before)
            RECOMPUTED_RUN.reset(token)
        layer.note(second)
        self._saved = dict(enumerate(saved))
