"""Mistakes of gradients on their way back: at regions' ends, in layers, in messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.defects import no_gradient_over_boundary, rounded_to_single_precision
from parity.tensor_defects import backward_of_the_reduction_scaled, entrance_without_sum
from plait.engine.pipeline.stage import Gradients, Stage
from plait.engine.pipeline.stage_exchange import Exchange
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import during, rank
from zoo.row import Named, Row


def mlp_entrance_without_sum() -> Any:
    """The gradient that leaves the MLP's region is not summed."""
    return during("backward_input", entrance_without_sum, layer="*.mlp")


def attention_reduction_scaled() -> Any:
    """The gradient that enters the attention's region is taken T times."""
    return during("backward_input", backward_of_the_reduction_scaled, layer="*.attention")


@contextmanager
def _after_backward(
    change: Callable[[list[Tensor], list[Tensor]], list[Tensor]], layer: str
) -> Iterator[None]:
    """The gradient of a layer's input is what `change` makes of it and of its output's gradient."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        given = [gradient.clone() for gradient in self.gradients[microbatch] if gradient is not None]
        original(self, microbatch, number)
        if self.layers[number].path == layer:
            gradients: Any = self.gradients[microbatch]
            self.gradients[microbatch] = list(change(gradients, given))

    with patch.object(Stage, "backward_input", backward_input):
        yield


def residual_forgotten() -> Any:
    """The gradient takes only the way through the MLP, not the one around it."""
    return _after_backward(lambda after, before: [after[0] - before[0]], cases.MLP)


def residual_twice() -> Any:
    """The gradient takes the way around the attention twice."""
    return _after_backward(lambda after, before: [after[0] + before[0]], cases.ATTENTION)


def gradient_zero_on_one_rank() -> Any:
    """Rank 1 loses the head's input gradient of its micro-batches."""
    return _after_backward(lambda after, before: [after[0] * (rank() == 0)], "head")


@contextmanager
def _messages(change: Callable[[Any, Gradients], Gradients]) -> Iterator[None]:
    original = Exchange.send_gradients

    def send_gradients(self: Exchange, action: Any, gradients: Gradients, peer: int) -> None:
        original(self, action, change(action, gradients), peer)

    with patch.object(Exchange, "send_gradients", send_gradients):
        yield


def gradient_of_another_microbatch() -> Any:
    """Every message backward is the first one again."""
    first: list[Gradients] = []

    def change(action: Any, gradients: Gradients) -> Gradients:
        first.append([None if gradient is None else gradient.clone() for gradient in gradients])
        return first[0]

    return _messages(change)


def gradient_with_the_wrong_sign() -> Any:
    """Messages backward are negative."""
    return _messages(lambda action, gradients: [None if one is None else -one for one in gradients])


def gradient_divided_by_stages() -> Any:
    """Each message backward is divided by the number of stages."""
    return _messages(lambda action, gradients: [None if one is None else one / 2 for one in gradients])


@contextmanager
def gradient_sent_too_early() -> Iterator[None]:
    """The message leaves before the stage's first layer had its backward."""
    early: dict[int, Gradients] = {}
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        if number == 0:
            early[microbatch] = list(self.gradients[microbatch])
        original(self, microbatch, number)

    with (
        patch.object(Stage, "backward_input", backward_input),
        _messages(lambda action, gradients: early[action.microbatch]),
    ):
        yield


def _row(defect: Any, model: Any, plan: Any, phase: StepPhase, layer: str, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("missed", "unexplained", "full") if key in more}
    named = Named(phase=phase, layer=layer, **{"microbatch": 0} | more)
    return Row(defect=defect, model=model, plan=plan, named=named, **shown)


FIRST, BOTH = (0,), (0, 1)
BACKWARD = (
    _row(
        entrance_without_sum,
        cases.GPT2,
        cases.TWO_PARTS,
        StepPhase.INPUT_GRADIENT,
        "head",
        ranks=BOTH,
        cause="sum over tp is missing",
    ),
    _row(
        mlp_entrance_without_sum,
        cases.LLAMA,
        cases.TWO_PARTS,
        StepPhase.INPUT_GRADIENT,
        cases.MLP,
        ranks=BOTH,
        cause="sum over tp is missing",
    ),
    _row(
        backward_of_the_reduction_scaled,
        cases.GPT2,
        cases.TWO_PARTS,
        StepPhase.INPUT_GRADIENT,
        cases.MLP,
        ranks=BOTH,
        cause="adds to the gradient is 2 times .* size of tp",
    ),
    _row(
        attention_reduction_scaled,
        cases.LLAMA,
        cases.TWO_PARTS,
        StepPhase.INPUT_GRADIENT,
        cases.ATTENTION,
        ranks=BOTH,
        cause="adds to the gradient is 2 times .* size of tp",
        full=True,
    ),
    _row(
        residual_forgotten,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.INPUT_GRADIENT,
        cases.MLP,
        ranks=(1,),
        full=True,
    ),
    _row(
        residual_twice,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.INPUT_GRADIENT,
        cases.ATTENTION,
        ranks=FIRST,
        full=True,
    ),
    _row(
        gradient_zero_on_one_rank,
        cases.GPT2,
        cases.TWO_COPIES,
        StepPhase.INPUT_GRADIENT,
        "head",
        microbatch=2,
        ranks=(1,),
        cause="zero",
        full=True,
    ),
    _row(
        no_gradient_over_boundary,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        ranks=FIRST,
        cause="zero",
    ),
    _row(
        gradient_of_another_microbatch,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        microbatch=1,
        ranks=FIRST,
        cause="micro-batch 0",
    ),
    _row(
        gradient_with_the_wrong_sign,
        cases.LLAMA,
        cases.TWO_STAGES,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        ranks=FIRST,
        cause="-1 times",
    ),
    _row(
        gradient_divided_by_stages,
        cases.LLAMA,
        cases.FORWARD_FIRST,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        ranks=FIRST,
        cause="1/2 times",
        full=True,
    ),
    _row(
        gradient_sent_too_early,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        ranks=FIRST,
        full=True,
    ),
    _row(
        rounded_to_single_precision,
        cases.GPT2,
        cases.TWO_STAGES,
        StepPhase.GRADIENT_MESSAGE,
        cases.ATTENTION,
        ranks=FIRST,
        cause="float32",
    ),
)
