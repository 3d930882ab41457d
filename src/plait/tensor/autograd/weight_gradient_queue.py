"""The queue of weight-gradient computations that a backward defers to a later `W` action of the schedule.

Other gradients autograd computes at once. A block has about ten biases and norms: added by autograd, each is
an operation of a few bytes, or two where the buffer has a wider dtype. Set aside for a backward and put back
after it, those of all layers that ran together are added to their buffers in one operation. So are gradients
of matrices that autograd computes, while their buffers hold nothing of the step yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from plait.tensor.autograd.float8_inputs import CastInputs
from plait.tensor.autograd.private_torch_functions import add_each
from plait.tensor.autograd.regathered_activations import GatherRegistry

WeightWork = Callable[[], object]
"""Adds one weight gradient of one micro-batch to its buffer."""
Held = list[tuple[nn.Parameter, Tensor]]
"""Parameters whose `.grad` is set aside, and their gradient buffers."""


@dataclass(frozen=True)
class BackwardMode:
    """What a backward does with weight gradients: compute them at once, queue, overlap or drop them."""

    keeps: bool = True
    """Whether they are computed at all."""
    defers: bool = True
    """Whether they are queued; else they are computed as the backward comes to them."""
    overlaps: bool = False
    """Whether they are computed before anything else follows, so that collectives may overlap with them."""


INPUT_ONLY = BackwardMode()
"""The backward `I`: the queue is left to `W`."""
WEIGHTS_NEXT = BackwardMode(overlaps=True)
"""The backward `B` of one layer: its queue is computed next, or earlier while a collective runs."""
WEIGHTS_AT_ONCE = BackwardMode(defers=False, overlaps=True)
"""The backward `B` of several layers, where operands of a queue would stay until the last of them."""
NO_WEIGHTS = BackwardMode(keeps=False)
"""A backward within a layer's forward, for a gradient that the layer itself reads."""


@dataclass
class WeightGradientQueue:
    """Queue of the weight gradients that a stage's backward leaves for later, in order."""

    adds_late: bool = False
    """Whether `W` adds all weight gradients, also those that `I` has computed with the layer's backward."""
    pending: list[WeightWork] = field(default_factory=list)
    mode: BackwardMode = INPUT_ONLY
    """How the running backward is done; torch hands the functions of a graph no argument to say so."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a weight, the buffer of its gradient while its `.grad` is set aside."""
    products: set[int] = field(default_factory=set)
    """The ids of the weights whose gradients are matrix products, of which a step's first may be written."""
    unwritten: set[int] = field(default_factory=set)
    """Those of them whose buffers hold nothing of this step yet, nor zeros."""
    gathered: GatherRegistry = field(default_factory=GatherRegistry)
    """The linears' inputs and output gradients that are gathered again for their weight gradients."""
    inputs: CastInputs = field(default_factory=CastInputs)
    """The inputs of the running layer that its float8 linears have cast."""

    def add(self, work: WeightWork) -> None:
        """Queue the computation of one weight gradient, compute it at once, or drop it, as `mode` says."""
        if self.mode.keeps and self.mode.defers:
            self.pending.append(work)
        elif self.mode.keeps:
            work()

    def buffer_of(self, weight: Tensor) -> Tensor:
        """Return the buffer that gradients of `weight` are added to, zeroed if this step has none in it yet.

        That is `weight.grad`, or the tensor that `set_aside` has taken from there.
        """
        buffer = self.buffers.get(id(weight), weight.grad)
        assert buffer is not None, "a gradient buffer is set before a backward"
        if self.unwritten and id(weight) in self.unwritten:
            self.unwritten.discard(id(weight))
            buffer.zero_()
        return buffer

    def begins(self, weights: Sequence[Tensor]) -> bool:
        """Return whether gradients of `weights` must overwrite the buffers; count them as written from now.

        They must where no buffer holds anything of this step. If only some do, the others are set to zero.
        """
        keys = set(map(id, weights))
        if keys <= self.unwritten:
            self.unwritten -= keys
            return True
        self.set_to_zero(weights)
        return False

    def set_to_zero(self, parameters: Iterable[Tensor]) -> None:
        """Set the gradients of `parameters` to zero where nothing was added to them in this step."""
        for parameter in parameters:
            if id(parameter) in self.unwritten:
                self.buffer_of(parameter)

    def take(self) -> list[WeightWork]:
        """Empty the queue and return its entries."""
        taken, self.pending = self.pending, []
        return taken

    def run(self) -> None:
        """Empty the queue and compute its weight gradients."""
        for work in self.take():
            work()

    def overlap(self) -> None:
        """Compute the queued weight gradients during a collective, if `mode` overlaps; else do nothing."""
        if self.mode.overlaps:
            self.run()

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> Held:
        """Set the `.grad` of parameters to None during a backward; return the tensors they had."""
        held = [(parameter, buffer) for parameter in parameters if (buffer := parameter.grad) is not None]
        for parameter, buffer in held:
            self.buffers[id(parameter)], parameter.grad = buffer, None
        return held

    def put_back(self, held: Held) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Restore the `.grad` of parameters; return those that got a new gradient meanwhile, with it."""
        self.buffers.clear()
        parameters, gradients = [], []
        for parameter, buffer in held:
            gradient, parameter.grad = parameter.grad, buffer
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)
        return parameters, gradients

    def add_found(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Add gradients that autograd has computed to the parameters' gradient buffers."""
        if self.unwritten:
            self.set_to_zero(parameters)
        totals = []
        for parameter in parameters:
            assert parameter.grad is not None, "a gradient buffer is set before a backward"
            totals.append(parameter.grad)
        add_each(totals, gradients)
