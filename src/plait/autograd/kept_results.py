"""Results that selective recomputation keeps from a layer's first forward for its second.

Recomputation recognises PyTorch's operations by itself. A function of several operations and messages
passes through `kept` what should not be computed, or sent, a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

Tensors = tuple[Tensor | None, ...]


class ResultKeeper(Protocol):
    """Stores the results of `kept` in a layer's first forward, or returns them in its second."""

    @property
    def has_results(self) -> bool:
        """Whether the next call of `kept` returns a result of the first forward."""

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()` and keep it; in the second forward, return what the first one kept."""


_KEEPER: ContextVar[ResultKeeper | None] = ContextVar("plait_result_keeper", default=None)


@contextmanager
def keeping(keeper: ResultKeeper) -> Iterator[None]:
    """Context in which `kept` stores its results in `keeper`, or takes them from it."""
    token = _KEEPER.set(keeper)
    try:
        yield
    finally:
        _KEEPER.reset(token)


def kept(compute: Callable[[], Tensors]) -> Tensors:
    """Return `compute()`, or what it returned in the layer's first forward."""
    keeper = _KEEPER.get()
    return compute() if keeper is None else keeper.result(compute)


def next_result_is_kept() -> bool:
    """Return whether the next call of `kept` will not compute anything."""
    keeper = _KEEPER.get()
    return keeper is not None and keeper.has_results
