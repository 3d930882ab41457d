"""Activation recomputation: a layer's saved tensors are computed again from its input for the backward.

    none        everything that autograd saves stays until the backward
    selective   matrix products and attention stay; the cheap rest (norms, activations) is recomputed
    full        only the layer's input stays

With `selective` and `full` a layer runs once more, inside `I`, and only up to the last tensor that its
backward needs, so its last product is not computed again. Random numbers are those of the first run.
(Korthikanti et al. 2022, arXiv:2205.05198, section 5, recompute attention and keep the rest; here it is the
other way round, since a fused attention keeps next to nothing.)

Of matrix products, convolutions and attention the second run with `selective` reuses the first one's results.
PyTorch's own selective checkpoints also keep the last result, which no backward needs, and return results
that were written to after the operation; here a result that is written to is not kept.

`TorchDispatchMode` is private by its path, but documented ("Extending PyTorch").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from plait.autograd.kept_results import Tensors, keeping
from plait.layers.nested import Value, map_tensors, tensors_of
from plait.plan import Recompute

_CACHED = frozenset(
    {
        *("addmm", "baddbmm", "bmm", "convolution", "mm"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Names of aten operations."""


def recomputing(mode: Recompute, run: Callable[..., Value]) -> Callable[..., Value]:
    """Return `run` with a backward that recomputes as `mode` specifies; call it with gradients enabled.

    The arguments of a call must not change until its backward.
    """
    if mode == "none":
        return run
    if mode == "full":
        return partial(checkpoint, run, use_reentrant=False)
    return partial(checkpoint, run, use_reentrant=False, context_fn=_selective_contexts())


def _selective_contexts() -> Callable[[], tuple[RecordOperations, ReplayOperations]]:
    """Return a `context_fn` for `checkpoint`: it makes the contexts of a layer's first and second forward."""
    most: int | None = None  # operations that a second run has replayed; None before the first backward

    def note(replayed: int) -> None:
        nonlocal most
        most = max(most or 0, replayed)

    def make() -> tuple[RecordOperations, ReplayOperations]:
        recorded = RecordOperations(most)
        return recorded, ReplayOperations(recorded, note)

    return make


class RecordOperations(TorchDispatchMode):
    """Context of a layer's first forward: stores the results of matrix products, convolutions, attention."""

    def __init__(self, most: int | None) -> None:
        """`most`: the maximum number of stored results; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = most
        self.results: list[Any] = []
        """None for an operation that is to be computed again."""
        self.kept: deque[tuple[Tensors, list[int]]] = deque()
        """The results of `result`, and their versions: an in-place write increases them."""
        self.active = False
        self._keeping: AbstractContextManager[None] = nullcontext()
        self._paused = False

    def __enter__(self) -> Self:
        """Start recording."""
        self.active = True
        self._keeping = keeping(self)
        self._keeping.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._keeping.__exit__(None, None, None)
        self.active = False

    @property
    def has_results(self) -> bool:
        """False: the first forward computes everything."""
        return False

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()` and keep it, but no result of an operation within."""
        self._paused = True
        try:
            made = compute()
        finally:
            self._paused = False
        tensors = tuple(None if one is None else one.detach() for one in made)
        self.kept.append((tensors, versions_of(tensors)))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func` and store its result; discard stored results that it writes to."""
        for tensor in _written(func, args, kwargs or {}):
            self._drop(tensor)
        result = func(*args, **(kwargs or {}))
        if _is_cached(func) and not self._paused:
            stores = self.most is None or len(self.results) < self.most
            # Without its graph, which would keep the activations alive.
            self.results.append(map_tensors(Tensor.detach, result) if stores else None)
        return result

    def _drop(self, written: Tensor) -> None:
        """Discard the stored results that share memory with a written tensor."""
        storage = written.untyped_storage()
        for number, result in enumerate(self.results):
            if any(tensor.untyped_storage() is storage for tensor in tensors_of(result)):
                self.results[number] = None


class ReplayOperations(TorchDispatchMode):
    """Context of a layer's second forward: returns the results that the first one stored."""

    def __init__(self, recorded: RecordOperations, note: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded
        self._note = note
        self._replayed = 0
        self._keeping: AbstractContextManager[None] = nullcontext()
        self._paused = False

    def __enter__(self) -> Self:
        """Start replaying."""
        self._replayed = 0
        self._keeping = keeping(self)
        self._keeping.__enter__()
        if self._recorded.active:  # the layer runs again within its first run: operations cannot be numbered
            self._recorded.results.clear()
            self._recorded.kept.clear()
            self._recorded.most = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop replaying."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._keeping.__exit__(None, None, None)
        self._note(self._replayed)

    @property
    def has_results(self) -> bool:
        """Whether the next result was kept, and has not been written to."""
        kept = self._recorded.kept
        return bool(kept) and versions_of(kept[0][0]) == kept[0][1]

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return the next result that the first forward kept; compute it if there is none."""
        if self.has_results:
            return self._recorded.kept.popleft()[0]
        if self._recorded.kept:
            self._recorded.kept.popleft()
        self._paused = True
        try:
            return compute()
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the stored result of `func` and forget it; run `func` where no result is stored."""
        found, results = None, self._recorded.results
        if _is_cached(func) and not self._paused:
            if self._replayed < len(results):
                found, results[self._replayed] = results[self._replayed], None
            self._replayed += 1
        return func(*args, **(kwargs or {})) if found is None else found


def versions_of(tensors: Tensors) -> list[int]:
    """Return the version counters of tensors, which each in-place write increases."""
    return [-1 if tensor is None else tensor._version for tensor in tensors]


def _is_cached(operation: Any) -> bool:
    return operation.namespace == "aten" and operation.overloadpacket.__name__ in _CACHED


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
