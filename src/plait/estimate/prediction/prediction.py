"""`predict`: the time and memory of a training step of a plan on given hardware, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from plait.errors import PlanError
from plait.estimate.memory.plan_memories import CutPipeline, PlanMemories, PredictedMemory, cut_pipeline
from plait.estimate.prediction.predicted_model import DecoderModel, PredictedModel
from plait.estimate.time.hardware import Hardware, load_hardware
from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.step_times import NANOSECOND, StepTimes, stage_kinds, stage_modes
from plait.pictures.quantities import memory_text, seconds_text
from plait.pictures.timelines.timeline import Timeline
from plait.plan.argument_checks import require_instance
from plait.plan.decoder_sizes import decoder_of
from plait.plan.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan's step. `print` shows them."""

    plan: Plan
    model: PredictedModel
    hardware: Hardware
    rows: int
    """Sequences of a data-parallel rank in a step."""
    layers_per_stage: tuple[int, ...]
    times: StepTimes
    memory: tuple[PredictedMemory, ...]
    """The memory of each rank of `pp`."""

    @property
    def step_seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.times.seconds

    @property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds of the step by use, on the rank that ends last; they add up to the step's time."""
        return self.times.breakdown

    @cached_property
    def timeline(self) -> Timeline:
        """The actions of each rank of `pp` with their times in nanoseconds, without the optimizer's step."""
        return self.times.timeline()

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return self.rows * self.plan.dp * self.model.context

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: needed operations over the peak of all devices in the linears' precision.

        That is fp8 with `plan.linears`, though heads and attention compute in the plan's. Recomputation is
        not counted.
        """
        needed = self.model.operations_per_token * self.tokens_per_second / self.plan.world
        return needed / self.hardware.peak_of(self.times.timer.shape.linear_precision)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: as `mfu`, with the forwards that full recomputation repeats."""
        modes = (
            self.plan.recompute
            if isinstance(self.plan.recompute, tuple)
            else (self.plan.recompute,) * len(self.model.kinds)
        )
        costs = self.model.layer_costs
        again = sum(cost for cost, mode in zip(costs, modes, strict=True) if mode == "full")
        return self.mfu * (1 + again / sum(costs) / 3)

    @property
    def peak_memory(self) -> float:
        """The most bytes of tensors that any rank allocates at its peak: the largest `allocated`."""
        return max(rank.allocated for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's allocated and reserved bytes are at most the memory of a device."""
        return max(rank.allocated + rank.reserved for rank in self.memory) <= self.hardware.memory

    @property
    def bound(self) -> str:
        """What takes the largest part of the step's time, in words."""
        return max(self.breakdown, key=lambda name: self.breakdown[name])

    def __str__(self) -> str:
        rows = [
            f"step       {seconds_text(self.step_seconds, 4)}, {self.tokens_per_second:,.0f} tokens/s on "
            f"{self.plan.world:,} ranks, MFU {self.mfu:.1%}, HFU {self.hfu:.1%}",
            f"memory     {memory_text(self.peak_memory)} allocated at most, {self._room}",
        ]
        rows += [
            f"{name:<26} {seconds_text(seconds, 4):>12}  {seconds / self.step_seconds:>6.1%}"
            for name, seconds in self.breakdown.items()
            if seconds >= NANOSECOND
        ]
        return "\n".join([*rows, *self.model.assumptions])

    @property
    def _room(self) -> str:
        room = self.hardware.memory - max(rank.allocated + rank.reserved for rank in self.memory)
        have = f"{memory_text(self.hardware.memory)} of {self.hardware.name}"
        return f"which fits the {have}" if room >= 0 else f"{memory_text(-room)} more than the {have}"


def predict(
    model: object,
    plan: Plan,
    hardware: Hardware | str | Path,
    *,
    rows: int | None = None,
    **about: Unpack[RunDetails],
) -> Prediction:
    """Return the predicted time and memory of a training step of `plan` on `hardware`.

    `model`: one that `parallelize` takes, on the meta device too, or the sizes of a gpt2 or llama as a
    `plait.plan.decoder_sizes.Decoder`. `rows`: sequences of a data-parallel rank in a step, each as long as
    the model's context; None: one a micro-batch. `hardware`: the name of a bundled file, a TOML file, or a
    `Hardware`. The other arguments are those of `plait.memory`: `inputs` and `targets` of any number of rows,
    `loss`, `rules` and `moments`; a model without a `context` needs `inputs`.

    What plait's own gpt2 and llama need is known from their sizes; layers of other models run once, on the
    meta device. There is no communication. Raises PlanError, ModelError, ScheduleError or ConfigError for
    what cannot run, and for a figure that the hardware lacks.
    """
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    machine, known = load_hardware(hardware), predicted_model(model, plan, about)
    rows = plan.microbatches if rows is None else rows
    _check_rows(plan, rows)
    known.check(plan)
    pipeline = cut_pipeline(plan, known.costs_for_cut(plan))
    return prediction_of(known, plan, machine, rows, pipeline, known.memories())


def prediction_of(
    model: PredictedModel,
    plan: Plan,
    hardware: Hardware,
    rows: int,
    pipeline: CutPipeline,
    memories: PlanMemories,
) -> Prediction:
    """Return the predicted time and memory of a step, given its schedule and its layers per stage.

    Raises ConfigError where the hardware lacks the peak of the linears' products.
    """
    sizes = model.sizes(plan, rows / plan.microbatches, on_cpu=not hardware.overlaps)
    hardware.peak_of(sizes.linear_precision)  # raises where it is not known
    stages, modes = stage_kinds(model.kinds, pipeline.cut), stage_modes(plan, pipeline.cut)
    memory = memories.ranks(sizes, pipeline, hardware.reserved)
    timer, owners = LayerTimer(sizes, hardware, sizes.precision), model.owners(plan, pipeline.cut)
    times = StepTimes(timer, pipeline.schedule, stages, modes, owners)
    return Prediction(plan, model, hardware, rows, pipeline.cut, times, memory)


class RunDetails(TypedDict, total=False):
    """Optional arguments of predictions, as of `plait.memory`: inputs, targets, loss, rules, `moments`."""

    inputs: Any
    targets: Any
    loss: Any
    rules: Any
    moments: Any


def predicted_model(model: object, plan: Plan, about: RunDetails) -> PredictedModel:
    """Return `model` as a `PredictedModel`: by its sizes if these suffice, else by its traced layers.

    `plan`: whose offloading and linears are predicted. Raises ModelError where rows are unknown.
    """
    if isinstance(model, PredictedModel):
        return model
    decoder = decoder_of(model)
    plain = plan.offload == "none" and plan.linears is None and about in ({}, {"moments": 2})
    if decoder is not None and decoder.experts is None and plain:
        return DecoderModel(decoder)
    from plait.estimate.prediction.traced_model import traced_model  # loads torch

    return traced_model(model, **about)


def _check_rows(plan: Plan, rows: int) -> None:
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < plan.microbatches:
        raise PlanError(
            f"rows is {rows!r}, and plan.microbatches is {plan.microbatches}: give at least one row for each "
            "micro-batch."
        )
