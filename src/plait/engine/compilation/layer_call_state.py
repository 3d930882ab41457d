"""One call of a compiled layer: the state that its operations share from the forward to the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.engine.compilation.weight_gradients import WeightTerms
from plait.tensor.autograd.kept_results import Tensors
from plait.tensor.autograd.regathered_activations import Gather, Regathered
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.dropout import Dropout

T = TypeVar("T")


@dataclass(eq=False)
class LayerCall:
    """One call of a layer: provides dropout masks and modules, and queues weight gradients."""

    queue: WeightGradientQueue
    parameters: Sequence[nn.Parameter]
    modules: Mapping[str, nn.Module]
    """The modules in the layer, by name."""
    _makers: dict[int, Callable[[], Tensor]] = field(default_factory=dict, init=False)
    """Of masks, by number: they make the same mask again."""
    _repeated: dict[int, RepeatedCall] = field(default_factory=dict, init=False)
    """Autograd calls that the backward repeats, by number."""

    def mask(self, number: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the dropout mask of module `name` at its call `number`; the same mask if asked for again."""
        if number not in self._makers:
            dropout = self.modules[name]
            assert isinstance(dropout, Dropout)
            self._makers[number] = dropout.next_mask_maker(shape, device)
        return self._makers[number]()

    def repeated(self, number: int) -> RepeatedCall:
        """Return the state of autograd call `number`, which the backward repeats; a new one on first use."""
        return self._repeated.setdefault(number, RepeatedCall())

    def regathered(self, part: Tensor, gather: Gather) -> Regathered:
        """Return a tensor that is all-gathered again on first use, or now if weight gradients come next."""
        found = self.queue.gathered.again(part, gather)
        if self.queue.mode.overlaps:
            found.start()
        return found

    def add_gradients(self, parameters: Sequence[nn.Parameter], backward: Callable[[], None]) -> None:
        """Run a `backward`, and add or queue the gradients of `parameters` that it computes."""
        queue = self.queue
        held = queue.set_aside(parameters)
        try:
            backward()
        finally:
            learning, found = queue.put_back(held)
        if queue.adds_late:
            queue.add(partial(queue.add_found, learning, found))
        else:
            queue.add_found(learning, found)

    def defer(self, terms: WeightTerms, operands: Sequence[Tensor | Regathered]) -> None:
        """Queue the computation of `terms`, parts of weight gradients, from `operands`.

        An output gradient that was gathered is gathered again, unless the weight gradients follow at once.
        """
        if self.queue.gathered.is_used:
            operands = [self._later(operand) for operand in operands]
        self.queue.add(partial(terms.add_to, self.queue, self.parameters, operands))

    def _later(self, operand: Tensor | Regathered) -> Tensor | Regathered:
        if isinstance(operand, Regathered) or self.queue.mode.overlaps:
            return operand
        source = self.queue.gathered.of(operand)
        return operand if source is None else self.queue.gathered.again(*source)


class RepeatedCall:
    """Both runs of an autograd call, in forward and backward; the second repeats the first's choices.

    Of the first run nothing else is kept. See `plait.tensor.autograd.kept_results`.
    """

    has_results = False

    def __init__(self) -> None:
        self.is_second = False
        self.output_is_read = True
        self._decisions: list[Any] = []

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return `compute()`, called anew in each run: no result is kept for the second."""
        return compute()

    def with_operations(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, called anew in each run: no result of an operation within is kept."""
        return compute()

    def once(self, compute: Callable[[], T]) -> T:
        """Return `compute()` in the first run, and in the second the first run's values in the same order."""
        if not self.is_second:
            self._decisions.append(compute())
            return self._decisions[-1]  # type: ignore[no-any-return]
        return self._decisions.pop(0)  # type: ignore[no-any-return]
