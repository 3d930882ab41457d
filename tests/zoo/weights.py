"""Mistakes of weight gradients, as micro-batches add to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.defects import (
    buffers_given_back_too_soon,
    gradients_of_the_step_before_stay,
    weight_work_of_another_microbatch,
    weight_work_twice,
)
from parity.tensor_defects import columns_learn_nothing, entrance_without_sum
from plait.engine.compilation import compiled_layer
from plait.engine.pipeline.stage import Stage
from plait.ranks.collectives import all_reduce
from plait.tensor.autograd import deferred_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.parallel import embedding_and_norm as embedding
from plait.verification.step_location import StepPhase
from zoo import cases, models
from zoo.patching import each_alone, in_single
from zoo.row import TWO_STEPS, Named, Row

MICROBATCHES = 2


@contextmanager
def _work_left_out(layer: str, microbatch: int | None = None) -> Iterator[None]:
    """The weight work of a layer is never done, or not for one micro-batch."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, number: int, position: int) -> None:
        if self.layers[position].path == layer and microbatch in (None, number):
            self.work[number, position] = []
        original(self, number, position)

    # Work that is done while a sum is waited for would not be left out.
    with (
        patch.object(WeightGradientQueue, "overlap", lambda self: None),
        patch.object(Stage, "backward_weight", backward_weight),
    ):
        yield


def work_of_the_last_microbatch_left_out() -> Any:
    """The head's weight does not learn from the last micro-batch."""
    return _work_left_out("head", MICROBATCHES - 1)


def work_of_one_layer_left_out() -> Any:
    """The attention's linears do not learn."""
    return _work_left_out(cases.ATTENTION)


def only_the_heads_part_of_a_tie() -> Any:
    """The table learns as the head's weight and not as the embedding's."""
    return _work_left_out("embedding")


def only_the_embeddings_part_of_a_tie() -> Any:
    """The other way round."""
    return _work_left_out("head")


@contextmanager
def biases_learn_nothing() -> Iterator[None]:
    """The backward of linears leaves the bias out."""
    original = deferred_weight_gradients._Linear.backward

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_input, of_weight, _, *others = original(ctx, gradient)
        return of_input, of_weight, None, *others

    with patch.object(deferred_weight_gradients._Linear, "backward", staticmethod(backward)):
        yield


@contextmanager
def _deferred_by_graphs(times: int) -> Iterator[None]:
    """The head's weight product, which is taken out of its graph, is queued so many times."""
    original = compiled_layer.CompiledLayer.forward

    def forward(self: Any, *given: Any) -> Any:
        made = original(self, *given)
        if made and self.layer.path == "head":
            run, defer = made[1], made[1].defer
            run.defer = lambda *terms: [defer(*terms) for _ in range(times)]
        return made

    with patch.object(compiled_layer.CompiledLayer, "forward", forward):
        yield


def product_of_a_graph_twice() -> Any:
    """It is queued twice."""
    return _deferred_by_graphs(2)


def product_of_a_graph_left_out() -> Any:
    """It is not queued."""
    return _deferred_by_graphs(0)


@contextmanager
def norm_inside_the_region() -> Iterator[None]:
    """What leaves the head's region is summed behind its norm, whose weight learns from one part only."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        if self.layers[number].path != "head":
            return original(self, microbatch, number)
        with entrance_without_sum():
            original(self, microbatch, number)
        group = self.layers[number].module.output.group
        self.gradients[microbatch] = [
            all_reduce(gradient.clone(), group).wait() for gradient in self.gradients[microbatch]
        ]
        return None

    with patch.object(Stage, "backward_input", backward_input):
        yield


@contextmanager
def norm_learns_twice() -> Iterator[None]:
    """The head's norm, which needs no weight work, gets its gradient twice."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        norm = self.layers[number].module.norm.weight if self.layers[number].path == "head" else None
        before = None if norm is None else norm.grad.clone()
        original(self, microbatch, number)
        if norm is not None:
            norm.grad.add_(norm.grad - before)

    with patch.object(Stage, "backward_input", backward_input):
        yield


def padding_learns() -> Any:
    """The row of the padding token gets a gradient."""
    original = deferred_weight_gradients.embedding

    def unpadded(input: Tensor, weight: Tensor, padding: int | None, queue: Any) -> Tensor:
        return original(input, weight, None, queue)

    return patch.object(deferred_weight_gradients, "embedding", unpadded)


def rows_of_others_learn() -> Any:
    """Tokens of other ranks are masked in the forward, but not in the backward."""
    original = embedding.embedding
    reduce = embedding.reduce
    looked_up: list[Tensor] = []

    def remembered(*arguments: Any) -> Tensor:
        looked_up.append(original(*arguments))
        return looked_up[-1]

    def unmasked(masked: Tensor, group: Any) -> Tensor:
        rows = looked_up.pop()
        return reduce(rows + (masked - rows).detach(), group)

    return patch.multiple(embedding, embedding=remembered, reduce=unmasked)


@contextmanager
def input_overwritten() -> Iterator[None]:
    """What the second stage was given for a micro-batch is overwritten by the next one's."""
    original = Stage.forward

    def forward(self: Stage, microbatch: int, number: int) -> None:
        original(self, microbatch, number)
        if (self.number, number, microbatch) == (1, 0, 1) and self.runs:
            before, now = self.runs[0, 0][0].inputs[0], self.runs[1, 0][0].inputs[0]
            before.data.copy_(now)

    with patch.object(Stage, "forward", each_alone(forward)):
        yield


@contextmanager
def added_up_in_single_precision() -> Iterator[None]:
    """After each micro-batch the gradients of the MLP are rounded."""
    original = Stage.backward_weight

    def backward_weight(self: Stage, microbatch: int, number: int) -> None:
        original(self, microbatch, number)
        if self.layers[number].path == cases.MLP:
            for parameter in self.layers[number].module.parameters():
                parameter.grad.copy_(in_single(parameter.grad))

    with patch.object(Stage, "backward_weight", backward_weight):
        yield


def _row(defect: Any, model: Any, plan: Any, layer: str, parameter: str, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("options", "missed", "unexplained", "full") if key in more}
    named = {"phase": StepPhase.WEIGHT_GRADIENT, "microbatch": 0} | more
    return Row(
        defect=defect,
        model=model,
        plan=plan,
        named=Named(layer=layer, parameter=parameter, **named),
        **shown,
    )


TIED = "embedding.token.weight"
WEIGHTS = (
    _row(
        weight_work_twice,
        cases.UNTIED,
        cases.TWO_STAGES,
        "head",
        "head.output.weight",
        cause="twice",
        full=True,
    ),
    _row(
        weight_work_of_another_microbatch,
        cases.GPT2,
        cases.ZERO_BUBBLE,
        "head",
        TIED,
        microbatch=1,
        ranks=(1,),
        cause="micro-batch 0",
    ),
    _row(
        work_of_the_last_microbatch_left_out,
        cases.GPT2,
        cases.TWO_STAGES,
        "head",
        TIED,
        microbatch=1,
        ranks=(1,),
        cause="not added",
        full=True,
    ),
    _row(
        work_of_one_layer_left_out,
        cases.LLAMA,
        cases.TWO_STAGES,
        cases.ATTENTION,
        r"blocks.0.attention.\w+.weight",
        ranks=(0,),
        cause="not added|zero",
    ),
    _row(columns_learn_nothing, cases.GPT2, cases.TWO_PARTS, "head", TIED, cause="not added|zero"),
    _row(
        biases_learn_nothing,
        cases.GPT2,
        cases.ZERO_BUBBLE,
        cases.MLP,
        r"blocks.0.mlp.\w+.bias",
        ranks=(1,),
        cause="not added|zero",
    ),
    _row(
        product_of_a_graph_twice,
        cases.UNTIED,
        replace(cases.ZERO_BUBBLE, compile="graphs"),
        "head",
        "head.output.weight",
        ranks=(1,),
        cause="twice|2 times",
    ),
    _row(
        product_of_a_graph_left_out,
        cases.UNTIED,
        replace(cases.TWO_STAGES, compile="graphs"),
        "head",
        "head.output.weight",
        ranks=(1,),
        cause="not added|zero",
        full=True,
    ),
    _row(
        only_the_heads_part_of_a_tie, cases.LLAMA, cases.TWO_COPIES, "embedding", TIED, cause="not added|zero"
    ),
    _row(
        only_the_embeddings_part_of_a_tie,
        cases.GPT2,
        cases.TWO_COPIES,
        "head",
        TIED,
        cause="not added|zero",
        full=True,
    ),
    _row(
        norm_inside_the_region,
        cases.LLAMA,
        cases.TWO_PARTS,
        "head",
        "head.norm.weight",
        ranks=(0, 1),
        cause="sum over tp is missing",
    ),
    _row(
        norm_learns_twice,
        cases.LLAMA,
        cases.ZERO_BUBBLE,
        "head",
        "head.norm.weight",
        ranks=(1,),
        cause="twice|2 times",
    ),
    _row(
        padding_learns,
        models.PADDED,
        cases.ANY_TWO_STAGES,
        "0",
        "0.weight",
        microbatch=None,
        cause="2:3 of dim 0",
    ),
    _row(rows_of_others_learn, cases.UNTIED, cases.TWO_PARTS, "embedding", TIED, full=True),
    _row(
        input_overwritten,
        models.LINEARS,
        cases.FORWARD_FIRST,
        "2",
        "2.weight",
        ranks=(1,),
    ),
    _row(
        buffers_given_back_too_soon,
        cases.GPT2,
        cases.FORWARD_FIRST_OF_THREE,
        cases.MLP,
        ".*",
        microbatch=None,
        ranks=(1,),
        also=(StepPhase.FORWARD, StepPhase.INPUT_GRADIENT),  # as soon as the next message is there
    ),
    _row(
        added_up_in_single_precision,
        cases.LLAMA,
        cases.TWO_STAGES,
        cases.MLP,
        r"blocks.0.mlp.\w+.weight",
        ranks=(1,),
        cause="float32",
    ),
    _row(
        gradients_of_the_step_before_stay,
        cases.GPT2,
        cases.TWO_STAGES,
        "head",
        ".*",
        step=1,
        cause="step before",
        options=TWO_STEPS,
    ),
)
