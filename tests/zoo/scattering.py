"""Mistakes of gradients that are cut between ranks: scatters, what is summed besides, norms of shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parity.defects import norm_of_own_stage_only, tie_not_reduced
from plait.engine import engine as gradient_clipping
from plait.engine import parallelize as composer
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import reducer
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.reducer import Reducer
from plait.ranks.collectives import all_reduce, reduce_scatter
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.schedules.lowering import lower as lowering
from plait.schedules.lowering.program import LoweringSpec
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.row import TWO_STEPS, Named, Row

TIED = "embedding.token.weight"


def shard_of_another_rank() -> Any:
    """Each rank gets the sums of the other's shard."""

    def scatter(tensor: Tensor, group: Group, *, out: Tensor | None = None, **_: Any) -> Handle[Tensor]:
        total = all_reduce(tensor.clone(), group, checked=False).wait()
        shard = total.chunk(group.size)[1 - group.index]
        return Handle.done(shard if out is None else out.copy_(shard), group)

    return patch.object(reducer, "reduce_scatter", scatter)


def scatter_without_sum() -> Any:
    """Each rank keeps its part of its own gradient."""

    def scatter(tensor: Tensor, group: Group, *, out: Tensor | None = None, **_: Any) -> Handle[Tensor]:
        return Handle.done(tensor.chunk(group.size)[group.index].clone(), group)

    return patch.object(reducer, "reduce_scatter", scatter)


def scatter_averages() -> Any:
    """As where the loss is that of a rank."""

    def mean(tensor: Tensor, group: Group, **options: Any) -> Handle[Tensor]:
        return reduce_scatter(tensor, group, "mean", **options)

    return patch.object(reducer, "reduce_scatter", mean)


@contextmanager
def _collected(first: Any, again: str = "") -> Iterator[None]:
    """Before a shard is collected `first` is done to its buffer; that of unit `again` is collected twice."""
    original = Reducer.collect

    def collect(self: Reducer, name: str) -> None:
        started = self._scattered[name]
        for buffer in self.units[name].trainable:
            first(buffer)
        original(self, name)
        if name == again:
            self._scattered[name] = started
            original(self, name)

    with patch.object(Reducer, "collect", collect):
        yield


def only_the_last_microbatch_kept() -> Any:
    """A shard is overwritten by each micro-batch's sum, not added to."""
    return _collected(lambda buffer: buffer.shard_gradient.zero_())


def tied_unit_collected_twice() -> Any:
    """Once for each of its layers."""
    return _collected(lambda buffer: None, again=TIED)


@contextmanager
def opened_without_zeros() -> Iterator[None]:
    """A whole gradient that is opened again holds what it held when it was scattered."""
    open_, scatter = Reducer.open, Reducer.scatter
    left: dict[int, Tensor] = {}

    def remember(self: Reducer, name: str) -> None:
        left.update({id(buffer): buffer.gradient.clone() for buffer in self.units[name].trainable})
        scatter(self, name)

    def open_again(self: Reducer, name: str) -> None:
        open_(self, name)
        for buffer in self.units[name].trainable:
            if id(buffer) in left:
                buffer.gradient.copy_(left[id(buffer)])
                self._queue.unwritten.clear()  # nor written first

    with patch.multiple(Reducer, open=open_again, scatter=remember):
        yield


@contextmanager
def opened_again_by_the_second_layer() -> Iterator[None]:
    """The embedding opens the gradient that it shares with the head, whose part is lost."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        if self.layers[number].path == "embedding":
            self.layers[number].module.token.weight.grad.zero_()
        original(self, microbatch, number)

    with patch.object(Stage, "backward_input", backward_input):
        yield


@contextmanager
def one_unit_scattered_for_one_microbatch() -> Iterator[None]:
    """The MLP's gradient of the second micro-batch stays where it is."""
    scatter, collect = Reducer.scatter, Reducer.collect
    counts = {"scatter": 0, "collect": 0}

    def is_second(name: str, what: str) -> bool:
        counts[what] += name == cases.MLP
        return name == cases.MLP and counts[what] == 2

    def scatter_first(self: Reducer, name: str) -> None:
        if not is_second(name, "scatter"):
            scatter(self, name)

    def collect_first(self: Reducer, name: str) -> None:
        if not is_second(name, "collect"):
            collect(self, name)

    with patch.multiple(Reducer, scatter=scatter_first, collect=collect_first):
        yield


def scattered_before_the_last_microbatch() -> Any:
    """The program takes the MLP's first micro-batch for its last."""
    original = lowering._ends

    def ends(program: Any, spec: LoweringSpec) -> Any:
        timings = {unit: replace(timing, scatters="each") for unit, timing in spec.timings.items()}
        every, found = original(program, replace(spec, timings=timings)), original(program, spec)
        for at, pairs in found.items():
            found[at] = [(unit, final) for unit, final in pairs if unit != cases.MLP]
        first = sorted(at for at, pairs in every.items() if cases.MLP in dict(pairs))[:1]
        for at in first:
            found[at].append((cases.MLP, True))
        return found

    return patch.object(lowering, "_ends", ends)


def shards_of_the_step_before_stay() -> Any:
    """What is collected is added to what the optimizer has seen already."""
    return patch.object(FlatBuffer, "adds_to_shard", False)


def copies_of_shards_not_summed() -> Any:
    """The sum over replicate is left out."""
    return patch.object(Reducer, "reduce", lambda self, name: None)


def shards_summed_over_shard() -> Any:
    """Shards are summed over the ranks that hold other ones."""

    def groups(owners: Any, kinds: Any, mesh: Any) -> dict[str, Any]:
        return dict.fromkeys(owners, mesh.group("shard"))

    return patch.object(composer, "reduction_groups", groups)


def tie_of_shards_not_reduced() -> Any:
    """Two stages scatter their parts of the tied table, and keep them."""
    return tie_not_reduced()


def norm_of_own_shards_only() -> Any:
    """Each rank clips by the norm of its shards."""
    return norm_of_own_stage_only()


def copies_of_shards_counted() -> Any:
    """The norm counts a shard on each rank of replicate."""
    return patch.object(composer, "counted_parameters", lambda owners, *_: frozenset(owners))


@contextmanager
def padding_counted() -> Iterator[None]:
    """Only the places of parameters are zero when a gradient is opened, not what lies between them."""
    original = Reducer.open

    def open_(self: Reducer, name: str) -> None:
        original(self, name)
        for buffer in self.units[name].trainable:
            buffer.gradient.fill_(1.0)
            for view in buffer.stage_views[0].gradients.values():
                view.zero_()

    with patch.object(Reducer, "open", open_):
        yield


def offloaded_gradients_not_clipped() -> Any:
    """Their copies on the device are."""
    return patch.object(gradient_clipping, "scale_to", lambda units, norm, max_norm: None)


def _row(phase: StepPhase, defect: Any, plan: Any, model: Any = cases.GPT2, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("options", "missed", "unexplained", "full") if key in more}
    named = Named(phase=phase, **{"ranks": BOTH} | more)
    return Row(defect=defect, model=model, plan=plan, named=named, **shown)


FIRST, BOTH, ALL = (0,), (0, 1), (0, 1, 2, 3)
OF_MLP = "blocks.0.mlp.*"
SCATTERING = (
    _row(
        StepPhase.REDUCTION,
        shard_of_another_rank,
        cases.CUT_GRADIENTS,
        cases.NARROW,
        cause="over other ranks",
    ),
    _row(StepPhase.REDUCTION, scatter_without_sum, cases.CUT_PARAMETERS, cause="missing"),
    _row(
        StepPhase.REDUCTION,
        scatter_averages,
        cases.CUT_STATE_OF_THREE,
        cause="1/2 .* over dp: either averaged",
    ),
    _row(
        StepPhase.REDUCTION,
        only_the_last_microbatch_kept,
        cases.CUT_GRADIENTS_EACH,
        cause="missing",
    ),
    _row(
        StepPhase.REDUCTION,
        tied_unit_collected_twice,
        cases.CUT_GRADIENTS_OF_THREE,
        cases.NARROW,
        parameter=TIED,
        cause="2 times .* size of dp",
    ),
    _row(
        StepPhase.WEIGHT_GRADIENT,
        opened_without_zeros,
        cases.CUT_GRADIENTS_EACH,
        layer="head",
        microbatch=1,
        ranks=FIRST,
        cause="more than once",
    ),
    _row(
        StepPhase.WEIGHT_GRADIENT,
        opened_again_by_the_second_layer,
        cases.CUT_PARAMETERS_EACH,
        layer="embedding",
        parameter=TIED,
        microbatch=0,
        ranks=FIRST,
    ),
    _row(
        StepPhase.REDUCTION,
        one_unit_scattered_for_one_microbatch,
        cases.CUT_PARAMETERS_EACH,
        cases.LLAMA,
        parameter=OF_MLP,
        cause="missing",
    ),
    _row(
        StepPhase.REDUCTION,
        scattered_before_the_last_microbatch,
        cases.CUT_PARAMETERS,
        parameter=OF_MLP,
        cause="missing",
    ),
    _row(
        StepPhase.REDUCTION,
        shards_of_the_step_before_stay,
        cases.CUT_PARAMETERS,
        step=1,
        cause="step before is still in it",
        options=TWO_STEPS,
    ),
    _row(
        StepPhase.REDUCTION,
        copies_of_shards_not_summed,
        cases.HYBRID_GRADIENTS,
        ranks=ALL,
        cause="sum over replicate is missing",
    ),
    _row(
        StepPhase.REDUCTION,
        shards_summed_over_shard,
        cases.HYBRID_STATE,
        ranks=ALL,
        cause="over other ranks",
        full=True,
    ),
    _row(
        StepPhase.REDUCTION,
        tie_of_shards_not_reduced,
        cases.STAGES_OF_CUT_PARAMETERS,
        parameter=TIED,
        ranks=ALL,
        cause="sum over pp is missing",
        full=True,
    ),
    _row(StepPhase.NORM, norm_of_own_shards_only, cases.CUT_PARAMETERS, cause="too small: it leaves out"),
    _row(
        StepPhase.NORM,
        copies_of_shards_counted,
        cases.HYBRID_GRADIENTS,
        ranks=ALL,
        cause="too large",
        full=True,
    ),
    _row(
        StepPhase.NORM,
        padding_counted,
        cases.CUT_GRADIENTS,
        cases.NARROW,
        cause="padding",
    ),
    _row(
        StepPhase.CLIP,
        offloaded_gradients_not_clipped,
        cases.CUT_GRADIENTS_AWAY,
        cause="not scaled",
    ),
)
