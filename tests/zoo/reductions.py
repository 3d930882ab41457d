"""Mistakes of the sums of gradients over ranks that hold the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.defects import mean_over_data_ranks, tie_not_reduced
from parity.tensor_defects import copies_not_summed
from plait.engine import Engine
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import reducer
from plait.engine.sharding.reducer import Reducer
from plait.ranks.collectives import all_reduce
from plait.tensor.parallel.partition import is_sharded
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import in_single, replaced_all_reduce
from zoo.row import Named, Row

MICROBATCHES = 2


@contextmanager
def one_unit_not_reduced() -> Iterator[None]:
    """The MLP keeps each rank's own gradients."""
    original = Reducer.reduce

    def reduce(self: Reducer, name: str) -> None:
        if name != cases.MLP:
            original(self, name)

    with patch.object(Reducer, "reduce", reduce):
        yield


def one_rank_overlooks_the_sum() -> Any:
    """Rank 1 keeps its own gradients."""

    def others(tensor: Tensor, group: Any) -> Tensor:
        total = all_reduce(tensor.clone(), group).wait()
        return tensor if group.index == 1 else tensor.copy_(total)

    return replaced_all_reduce(reducer, "dp", others)


def tie_reduced_twice() -> Any:
    """A parameter on two stages is summed over them again."""

    def twice(tensor: Tensor, group: Any) -> Tensor:
        return all_reduce(all_reduce(tensor, group).wait(), group).wait()

    return replaced_all_reduce(reducer, "tie", twice)


def reduced_in_single_precision() -> Any:
    """Gradients go through float32 on their way."""

    def rounded(tensor: Tensor, group: Any) -> Tensor:
        return tensor.copy_(all_reduce(in_single(tensor), group).wait())

    return replaced_all_reduce(reducer, "dp", rounded)


@contextmanager
def whole_parameters_summed_over_tp() -> Iterator[None]:
    """What is whole on every rank of tp has its gradient summed there as well."""
    original = Engine.forward_backward

    def forward_backward(self: Engine, *batch: Any) -> Tensor:
        mean = original(self, *batch)
        for name, parameter in self.named_parameters():
            if not is_sharded(self.layouts[name]):
                all_reduce(parameter.grad, self.mesh.group("tp")).wait()
        return mean

    with patch.object(Engine, "forward_backward", forward_backward):
        yield


@contextmanager
def reduced_before_the_last_microbatch() -> Iterator[None]:
    """The MLP's sums are made when one micro-batch is still to come, which stays the rank's own."""
    backward_weight, reduce = Stage.backward_weight, Reducer.reduce
    early: dict[int, Tensor] = {}

    def remember(self: Stage, microbatch: int, number: int) -> None:
        if microbatch == MICROBATCHES - 1:
            early.update({id(p): p.grad.clone() for p in self.layers[number].module.parameters()})
        backward_weight(self, microbatch, number)

    def reduce_early(self: Reducer, name: str) -> None:
        own = {}
        if name == cases.MLP:
            for parameter in self.units[name].parameters.values():
                before = early[id(parameter)]
                own[parameter] = parameter.grad - before
                parameter.grad.copy_(before)
        reduce(self, name)
        if own:
            self.finish()
            for parameter, last in own.items():
                parameter.grad.add_(last)

    with patch.object(Stage, "backward_weight", remember), patch.object(Reducer, "reduce", reduce_early):
        yield


def _row(defect: Any, model: Any, plan: Any, parameter: str, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("missed", "unexplained", "full") if key in more}
    named = Named(phase=StepPhase.REDUCTION, parameter=parameter, **{"ranks": (0, 1)} | more)
    return Row(defect=defect, model=model, plan=plan, named=named, **shown)


TIED = "embedding.token.weight"
MISSING = "sum over {} is missing".format
REDUCTIONS = (
    _row(
        mean_over_data_ranks,
        cases.GPT2,
        cases.TWO_COPIES_OF_THREE,
        ".*",
        cause="1/2 .* over dp: either averaged",
    ),
    _row(one_unit_not_reduced, cases.GPT2, cases.TWO_COPIES, "blocks.0.mlp.*", cause=MISSING("dp")),
    _row(one_rank_overlooks_the_sum, cases.GPT2, cases.TWO_COPIES, ".*", ranks=(1,), cause="dp 0", full=True),
    _row(
        reduced_before_the_last_microbatch, cases.LLAMA, cases.TWO_COPIES, "blocks.0.mlp.*", cause="reduction"
    ),
    _row(
        reduced_in_single_precision,
        cases.LLAMA,
        cases.TWO_COPIES,
        ".*",
        cause="float32",
        full=True,
    ),
    _row(tie_not_reduced, cases.GPT2, cases.TWO_STAGES, TIED, cause=MISSING("pp")),
    _row(tie_reduced_twice, cases.GPT2, cases.TWO_STAGES_OF_THREE, TIED, cause="2 times .* size of pp"),
    _row(
        copies_not_summed,
        cases.SHARING,
        cases.TWO_PARTS,
        r"blocks.0.attention.(key|value).weight",
        cause=MISSING("tp"),
    ),
    _row(
        whole_parameters_summed_over_tp,
        cases.GPT2,
        cases.TWO_PARTS_OF_THREE,
        r".*(norm|output.bias|down.bias|position).*",
        cause="2 times .* size of tp",
    ),
)
