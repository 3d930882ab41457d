"""The cached operations of recomputation: results of a layer's first run that its second run takes over.

These are matrix products, convolutions and attention. PyTorch's own selective checkpoints also keep the last
result, which no backward needs, and return results that were written to after the operation; here a result
that is written to is not kept.

`TorchDispatchMode` is private by its path, but documented ("Extending PyTorch").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.layers.nested import map_tensors, tensors_of

_CACHED = frozenset(
    {
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Names of aten operations."""


@dataclass
class OperationCache:
    """The results of one run's operations, in their order; None for one that is to be computed again."""

    most: int | None
    """How many results to keep; None: all."""
    results: list[Any] = field(default_factory=list)
    recording: bool = False
    """Whether the first run is under way."""

    def add(self, result: Any) -> None:
        """Append the next result, without its graph, which would keep the activations alive."""
        wanted = self.most is None or len(self.results) < self.most
        self.results.append(map_tensors(Tensor.detach, result) if wanted else None)

    def drop(self, written: Tensor) -> None:
        """Drop the results that share memory with a tensor that is written to."""
        storage = written.untyped_storage()
        for number, result in enumerate(self.results):
            if any(tensor.untyped_storage() is storage for tensor in tensors_of(result)):
                self.results[number] = None

    def take(self, number: int) -> Any:
        """Remove and return a result; None where the operation is to be computed again."""
        if number >= len(self.results):
            return None
        result, self.results[number] = self.results[number], None
        return result

    def disable(self) -> None:
        """Keep nothing: the layer runs again within its first run, so operations cannot be numbered."""
        self.results.clear()
        self.most = 0


class RecordOperations(TorchDispatchMode):
    """The context of a layer's first run: results go to `cache`."""

    def __init__(self, cache: OperationCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def __enter__(self) -> Self:
        """Start to record."""
        self._cache.recording = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._cache.recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`; add its result to the cache, and drop the results that it writes to."""
        for tensor in _written(func, args, kwargs or {}):
            self._cache.drop(tensor)
        result = func(*args, **(kwargs or {}))
        if _is_cached(func):
            self._cache.add(result)
        return result


class ReplayOperations(TorchDispatchMode):
    """The context of a layer's second run: results come from `cache`; at its end `note` gets their number."""

    def __init__(self, cache: OperationCache, note: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._note = note
        self._asked = 0

    def __enter__(self) -> Self:
        """Start to replay."""
        self._asked = 0
        if self._cache.recording:
            self._cache.disable()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop replaying."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._note(self._asked)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the cached result of `func`, or run it."""
        found = None
        if _is_cached(func):
            found = self._cache.take(self._asked)
            self._asked += 1
        return func(*args, **(kwargs or {})) if found is None else found


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
