"""Recomputing activations: what a layer's backward needs is made again, from its input, when it is due.

    none        everything that autograd saves stays until the backward
    selective   products of matrices and attention stay; the cheap rest (norms, activations) is made again
    full        only the layer's input stays

Either way a layer runs once more, inside `I`, and only up to the last tensor that its backward asks for, so
its last product is not done again. Random numbers are those of the first time. (Korthikanti et al. 2022,
arXiv:2205.05198, section 5, make attention again and keep the rest; here it is the other way round, since a
fused attention keeps next to nothing.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from plait.autograd.weight_queue import WeightGradientQueue
from plait.layers.nested import Value
from plait.pipeline.products import Keeping, Kept, Replaying
from plait.plan import Recompute


class Recomputation:
    """How one layer runs, so that its backward can run it again."""

    def __init__(self, mode: Recompute, queue: WeightGradientQueue) -> None:
        self._mode = mode
        self._queue = queue
        self._asked: int | None = None
        """How many products a second run has asked for, at most."""

    def __call__(self, run: Callable[[Value], Value], value: Value) -> Value:
        """What `run` gives for `value`, which must not change until the backward."""
        own = partial(_apart, run, self._queue)
        if self._mode == "none" or not torch.is_grad_enabled():
            return own(value)
        if self._mode == "full":
            return checkpoint(own, value, use_reentrant=False)
        return checkpoint(own, value, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[Keeping, Replaying]:
        """Around the first run of a micro-batch, and around the second."""
        kept = Kept(self._asked)

        def note(asked: int) -> None:
            self._asked = max(self._asked or 0, asked)

        return Keeping(kept), Replaying(kept, note)


def _apart(run: Callable[[Value], Value], queue: WeightGradientQueue, value: Value) -> Value:
    """`run`, whose own backwards, if it has any, ask for no weight gradient."""
    with queue.discarding():
        return run(value)
