"""Results of a layer's forward that recomputation keeps, so that the second forward does not compute them.

While a layer runs under recomputation, `RECOMPUTED_RUN` holds the run. A function whose result should not be
computed, or sent, a second time passes through `kept`. A function of torch that saves tensors for a backward
of its own passes through `with_kept_operations`. What must not differ between the two runs, such as the
routing of tokens, passes through `computed_once`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
Tensors = tuple[Tensor | None, ...]
KEPT_OPERATIONS = frozenset(
    {
        *("addmm", "baddbmm", "bmm", "convolution", "mm"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Names of ATen operations whose results selective recomputation keeps."""


class RecomputedRun(Protocol):
    """Interface of a run of a recomputed layer: the first, in the forward, or the second, in the backward."""

    @property
    def is_second(self) -> bool:
        """Whether this is the second run, in the backward, which stops at the last tensor needed."""

    @property
    def output_is_read(self) -> bool:
        """Whether the output of this run is needed, or only the tensors that it saves."""

    @property
    def has_results(self) -> bool:
        """Whether the next call of `result` returns a result of the first run."""

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()` and keep it; in the second run, return what the first one kept."""

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, and keep, or in the second run reuse, results of the operations within."""

    def once(self, compute: Callable[[], T]) -> T:
        """Return `compute()`; in the second run, what it returned in the first, also in mode "full"."""


RECOMPUTED_RUN: ContextVar[RecomputedRun | None] = ContextVar("plait_recomputed_run", default=None)
"""The run in progress; None without recomputation."""


def kept(compute: Callable[[], Tensors]) -> Tensors:
    """Return `compute()`; in the second run of a recomputed layer, the result kept in its first run."""
    run = RECOMPUTED_RUN.get()
    return compute() if run is None else run.result(compute)


def computed_once(compute: Callable[[], T]) -> T:
    """Return `compute()`, or what it returned in the layer's first run, also if that keeps nothing else.

    For small results that decide on shapes: routing indices, counts of rows.
    """
    run = RECOMPUTED_RUN.get()
    return compute() if run is None else run.once(compute)


def with_kept_operations(compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`; in a layer's second run, with its `KEPT_OPERATIONS`' results of the first."""
    run = RECOMPUTED_RUN.get()
    return compute() if run is None else run.with_operations(compute)


def next_result_is_kept() -> bool:
    """Return whether the next call of `kept` returns a result of the first run, without computing."""
    run = RECOMPUTED_RUN.get()
    return run is not None and run.has_results
