"""Mistakes with what is kept: a receive buffer that is sent on, a batch and targets of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from parity import data
from parity.cases import case
from parity.layers import CLASSES, HIDDEN
from plait.engine.pipeline.stage_exchange import Exchange
from plait.engine.runner import Runner
from plait.plan.plan import Plan
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import TWO_STEPS, Named, Row


class WithMask(nn.Module):
    """A linear, and a factor of each row that all later layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.detach().abs()


class Factored(nn.Module):
    """A linear of what is given, times the factor, which is passed on; `last`: alone."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(HIDDEN, CLASSES if last else HIDDEN), last

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        output = self.linear(value[0] * value[1])
        return output if self.last else (output, value[1])


def passing_a_mask() -> nn.Module:
    return nn.Sequential(WithMask(), Factored(), Factored(), Factored(last=True))


MASKED = case(passing_a_mask, data.draw_vectors)


def sent_from_its_receive_buffer() -> Any:
    """A tensor that a stage passes on is sent from the buffer that the next one is received into.

    While a stage keeps what its backward needs, no buffer is free; in an evaluation it is used again at once.
    """
    return patch.object(Exchange, "safe_to_keep", lambda self, tensor: tensor)


@contextmanager
def _kept(number: int) -> Iterator[None]:
    """A rank runs each step on the inputs (0) or the targets (1) of its first."""
    original, kept = Runner.loss_batch, list[Any]()

    def loss_batch(self: Runner, *batch: Any, **how: Any) -> Any:
        kept.append(batch[number])
        given = list(batch)
        given[number] = kept[0]
        return original(self, *given, **how)

    with patch.object(Runner, "loss_batch", loss_batch):
        yield


def targets_of_the_first_step() -> Any:
    """The loss is given the targets of the first step in each."""
    return _kept(1)


def inputs_of_the_first_step() -> Any:
    """So are the first stage's inputs."""
    return _kept(0)


SENT_ON = Row(
    defect=sent_from_its_receive_buffer,
    model=MASKED,
    plan=Plan(pp=3, microbatches=6),
    named=Named(
        phase=StepPhase.MESSAGE, layer="1", step=1, cause="used again too early|is that of micro-batch"
    ),
)
"""On threads, where what is sent is read when it is received; processes copy it at once."""
PASSING = (
    Row(
        defect=targets_of_the_first_step,
        model=cases.GPT2,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.LOSS, step=1, microbatch=0, cause="the targets of the step before"),
        options=TWO_STEPS,
    ),
    Row(
        defect=inputs_of_the_first_step,
        model=cases.GPT2,
        plan=cases.TWO_STAGES,
        named=Named(phase=StepPhase.INPUT, step=1, microbatch=0, cause="that of the step before"),
        options=TWO_STEPS,
        full=True,
    ),
)
