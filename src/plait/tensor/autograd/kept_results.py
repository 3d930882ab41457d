"""Results of a layer's forward that recomputation keeps, so that the second forward does not compute them.

While a layer runs under recomputation, `RECOMPUTED_RUN` holds the run. A function whose result should not be
computed, or sent, a second time passes through `kept`. A function of torch that saves tensors for a backward
of its own passes through `with_kept_operations`. A decision, such as which experts a token is sent to, passes
through `decided_once`: in every mode of recomputation, the second run takes that of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

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
    """Interface of a recomputed layer's first run, in the forward, and second run, in the backward."""

    @property
    def is_second(self) -> bool:
        """Whether this run is for the backward, and ends at the last tensor that the backward needs."""

    @property
    def has_results(self) -> bool:
        """Whether the next call of `result` returns a result of the first run."""

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()` and keep it; in the second run, return what the first one kept."""

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, and keep, or in the second run reuse, results of the operations within."""


RECOMPUTED_RUN: ContextVar[RecomputedRun | None] = ContextVar("plait_recomputed_run", default=None)
"""The run in progress; None without recomputation, and in a first run that keeps no results."""


def kept(compute: Callable[[], Tensors]) -> Tensors:
    """Return `compute()`, or what it returned in the layer's first run."""
    run = RECOMPUTED_RUN.get()
    return compute() if run is None else run.result(compute)


def with_kept_operations(compute: Callable[[], Tensor]) -> Tensor:
    """Return `compute()`, where results of `KEPT_OPERATIONS` are those of the layer's first run."""
    run = RECOMPUTED_RUN.get()
    return compute() if run is None else run.with_operations(compute)


def next_result_is_kept() -> bool:
    """Return whether the next call of `kept` will not compute anything."""
    run = RECOMPUTED_RUN.get()
    return run is not None and run.has_results


@dataclass
class Decisions:
    """Results that a layer's first run has decided on, and that its second run repeats, in the same order."""

    made: list[Tensors] = field(default_factory=list)
    repeated: int | None = None
    """How many of them a second run has repeated; None in the first run."""

    def result(self, decide: Callable[[], Tensors]) -> Tensors:
        """Return `decide()` in the first run; in the second, the next result of the first."""
        if self.repeated is None:
            self.made.append(decide())
            return self.made[-1]
        self.repeated += 1
        # A layer that decides more often than before also saves other tensors, which is refused by name.
        return self.made[self.repeated - 1] if self.repeated <= len(self.made) else decide()


DECISIONS: ContextVar[Decisions | None] = ContextVar("plait_decisions", default=None)
"""The decisions of the run in progress; None without recomputation."""


def decided_once(decide: Callable[[], Tensors]) -> Tensors:
    """Return `decide()`, or what it returned in the layer's first run; results have no gradient."""
    decisions = DECISIONS.get()
    return decide() if decisions is None else decisions.result(decide)
