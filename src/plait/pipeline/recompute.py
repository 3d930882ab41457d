"""Activation recomputation: a layer's saved tensors are computed again from its input for the backward.

    none        everything that autograd saves stays until the backward
    selective   matrix products and attention stay; the cheap rest (norms, activations) is recomputed
    full        only the layer's input stays

With `selective` and `full` a layer runs once more, inside `I`, and only up to the last tensor that its
backward needs, so its last product is not computed again. Random numbers are those of the first run.
(Korthikanti et al. 2022, arXiv:2205.05198, section 5, recompute attention and keep the rest; here it is the
other way round, since a fused attention keeps next to nothing.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.utils.checkpoint import checkpoint

from plait.layers.nested import Value
from plait.pipeline.recompute_cache import RecordOperations, ReplayOperations
from plait.plan import Recompute


def recomputing(mode: Recompute, run: Callable[..., Value]) -> Callable[..., Value]:
    """Return `run` with a backward that recomputes as `mode` specifies; call it with gradients enabled.

    The arguments of a call must not change until its backward.
    """
    if mode == "none":
        return run
    if mode == "full":
        return partial(checkpoint, run, use_reentrant=False)
    return partial(checkpoint, run, use_reentrant=False, context_fn=_SelectiveContexts().make)


class _SelectiveContexts:
    """Makes the contexts of selective recomputation, for a layer's first and second forward."""

    def __init__(self) -> None:
        self._replayed: int | None = None
        """The most operations that a second run has replayed; None before the first backward."""

    def make(self) -> tuple[RecordOperations, ReplayOperations]:
        def note(replayed: int) -> None:
            self._replayed = max(self._replayed or 0, replayed)

        recorded = RecordOperations(self._replayed)
        return recorded, ReplayOperations(recorded, note)
