"""Keeping the products of a layer's first run (of matrices, and attention), for its second run.

PyTorch's own selective checkpoints keep the last product, too, which no backward asks for, and give back what
somebody has meanwhile written to; a product that is written to is not kept here.

The base class that sees each operation is private by its path, but documented ("Extending PyTorch").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.layers.nested import map_tensors, tensors_of

_PRODUCTS = frozenset(
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
"""Of aten."""


@dataclass
class Kept:
    """The products of one run, in their order; None where one has to be done again."""

    most: int | None
    """How many are worth keeping; None: all."""
    results: list[Any] = field(default_factory=list)
    runs: bool = False
    """Whether the first run goes on."""

    def keep(self, result: Any) -> None:
        """The next product. Without its graph, which would keep what is to go."""
        wanted = self.most is None or len(self.results) < self.most
        self.results.append(map_tensors(Tensor.detach, result) if wanted else None)

    def forget(self, written: Tensor) -> None:
        """Somebody writes to this memory."""
        storage = written.untyped_storage()
        for number, result in enumerate(self.results):
            if any(tensor.untyped_storage() is storage for tensor in tensors_of(result)):
                self.results[number] = None

    def take(self, number: int) -> Any:
        """A product, once; None where it has to be done again."""
        if number >= len(self.results):
            return None
        result, self.results[number] = self.results[number], None
        return result

    def abandon(self) -> None:
        """Keep nothing: the layer runs a second time within its first run, so products cannot be counted."""
        self.results.clear()
        self.most = 0


class Keeping(TorchDispatchMode):
    """While it is entered, products go to `kept`."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> Self:
        """The first run begins."""
        self._kept.runs = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """It is over."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._kept.runs = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`; keep what it gives, or forget what it changes."""
        for tensor in _written(func, args, kwargs or {}):
            self._kept.forget(tensor)
        result = func(*args, **(kwargs or {}))
        if _is_product(func):
            self._kept.keep(result)
        return result


class Replaying(TorchDispatchMode):
    """While it is entered, products come from `kept`; at the end `note` is told how many were asked for."""

    def __init__(self, kept: Kept, note: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._note = note
        self._asked = 0

    def __enter__(self) -> Self:
        """A second run begins."""
        self._asked = 0
        if self._kept.runs:
            self._kept.abandon()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """It is over."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._note(self._asked)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`, or give what it gave the first time."""
        found = None
        if _is_product(func):
            found = self._kept.take(self._asked)
            self._asked += 1
        return func(*args, **(kwargs or {})) if found is None else found


def _is_product(operation: Any) -> bool:
    return operation.namespace == "aten" and operation.overloadpacket.__name__ in _PRODUCTS


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation writes to."""
    if operation.namespace == "c10d":  # collectives write to what they are given, and do not say so
        yield from tensors_of(args)
    schema = operation._schema
    if schema.is_mutable:
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from tensors_of(given)
