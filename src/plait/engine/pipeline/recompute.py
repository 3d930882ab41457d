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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.engine.pipeline.recomputed_runs import FirstRun, RecordOperations, ReplayOperations, SecondRun
from plait.errors import ModelError
from plait.plan.plan import Recompute
from plait.ranks.device import random_state, set_random_state
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN
from plait.tensor.layer_values import Value, list_of_tensors

Run = Callable[..., Value]


def recomputing(mode: Recompute, run: Run, parameters: Sequence[Tensor] = ()) -> Run:
    """Return `run` with a backward that recomputes as `mode` specifies; call it with gradients enabled.

    The arguments of a call must not change until its backward. `parameters`: those of the layer.
    """
    if mode == "none":
        return run
    return RecomputingLayer(run, parameters, keeps_results=mode == "selective")


class RecomputingLayer:
    """A layer's forward with recomputation; learns from each backward how many results are worth keeping."""

    def __init__(self, run: Run, parameters: Sequence[Tensor] = (), *, keeps_results: bool) -> None:
        self.run = run
        self.parameters = parameters
        self.keeps_results = keeps_results
        self.most_results: int | None = None if keeps_results else 0
        """Results of `kept` that a second run has used; None before the first one."""
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
            return call.run_first() if self.keeps_results else self.run(*arguments)

    def note_no_second_run(self) -> None:
        """Keep no results in later calls: a first run has saved nothing that needs a second run."""
        self.sees_all = False
        self.most_results, self.most_operations = self.most_results or 0, self.most_operations or 0

    def note(self, second: SecondRun) -> None:
        """Note how many results a second run has used."""
        if self.keeps_results:
            self.sees_all = second.needs_all or (self.sees_all and self.most_operations is not None)
            self.most_results = max(self.most_results or 0, second.used_results)
            self.most_operations = max(self.most_operations or 0, second.used_operations)


class _AllSaved(BaseException):
    """Ends a second run that has saved what the first one did; no `except Exception` of a layer stops it."""


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
        self._first = FirstRun(layer.most_results, layer.most_operations, sees_all=layer.sees_all)

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
        """Run the layer, and keep what a second run will use."""
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
        layer, second, before = self._layer, SecondRun(self._first), random_state()
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
            with torch.enable_grad(), saved_tensors_hooks(save, _unchanged), others:
                layer.run(*self._arguments)
        except _AllSaved:
            pass
        finally:
            set_random_state(before)
            RECOMPUTED_RUN.reset(token)
        layer.note(second)
        self._saved = dict(enumerate(saved))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
