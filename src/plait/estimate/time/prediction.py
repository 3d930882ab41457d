"""`predict`: the time and memory of a training step of a plan on given hardware, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from plait.errors import PlanError
from plait.estimate.time.hardware import Hardware, load_hardware
from plait.estimate.time.layer_operations import MicrobatchShape
from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.memory_by_size import PredictedMemory, predicted_memory
from plait.estimate.time.step_times import NANOSECOND, StepTimes, stage_kinds, stage_modes
from plait.pictures.quantities import memory_text, seconds_text
from plait.pictures.timelines.timeline import Timeline
from plait.plan.arguments import require_instance
from plait.plan.model_sizes import Decoder, decoder_of
from plait.plan.plan import Plan
from plait.schedules.schedule import Schedule
from plait.schedules.search.stage_cuts import LayerCosts, schedule_and_cut


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan's step. `print` shows them."""

    plan: Plan
    decoder: Decoder
    hardware: Hardware
    rows: int
    """Sequences of a data-parallel rank in a step."""
    layers_per_stage: tuple[int, ...]
    times: StepTimes
    memory: tuple[PredictedMemory, ...]
    """The memory of each rank of `pp`."""

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return self.times.seconds

    @property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds of the step by what the rank that ends last spends them on; they add up to its time."""
        return self.times.breakdown

    @cached_property
    def timeline(self) -> Timeline:
        """The actions of each rank of `pp` with their times in nanoseconds, without the optimizer's step."""
        return self.times.timeline()

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return self.rows * self.plan.dp * self.decoder.context

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: needed operations over the peak of all devices in the plan's precision.

        Recomputation is not counted.
        """
        needed = self.decoder.operations_per_token * self.tokens_per_second / self.plan.world
        return needed / self.hardware.peak_of(self.times.timer.shape.precision)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: as `mfu`, with the forwards that full recomputation repeats."""
        modes = (
            self.plan.recompute
            if isinstance(self.plan.recompute, tuple)
            else (self.plan.recompute,) * len(self.decoder.kinds)
        )
        costs = self.decoder.layer_costs
        again = sum(cost for cost, mode in zip(costs, modes, strict=True) if mode == "full")
        return self.mfu * (1 + again / sum(costs) / 3)

    @property
    def peak_memory(self) -> float:
        """The largest `allocated` of any rank, in bytes."""
        return max(rank.allocated for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's allocated and reserved bytes are at most the memory of a device."""
        return max(rank.allocated + rank.reserved for rank in self.memory) <= self.hardware.memory

    @property
    def bound(self) -> str:
        """The largest part of the breakdown, in words."""
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
        return "\n".join(rows)

    @property
    def _room(self) -> str:
        room = self.hardware.memory - max(rank.allocated + rank.reserved for rank in self.memory)
        have = f"{memory_text(self.hardware.memory)} of {self.hardware.name}"
        return f"which fits the {have}" if room >= 0 else f"{memory_text(-room)} more than the {have}"


def predict(
    model: object, plan: Plan, hardware: Hardware | str | Path, *, rows: int | None = None
) -> Prediction:
    """Return the predicted time and memory of a training step of `plan` on `hardware`.

    `model`: one that `plait.models.gpt2` or `llama` has made, on the meta device too, or its sizes as a
    `plait.plan.model_sizes.Decoder`. `rows`: sequences of a data-parallel rank in a step, each as long as
    the model's context; None: one a micro-batch. `hardware`: the name of a bundled file, a TOML file, or a
    `Hardware`.

    Nothing runs, and there is no communication. Raises PlanError, ModelError, ScheduleError or ConfigError
    for what cannot run, and for a figure that the hardware lacks.
    """
    require_instance("the plan", plan, Plan, "give a plait.Plan", PlanError)
    machine, decoder = load_hardware(hardware), decoder_of(model)
    rows = plan.microbatches if rows is None else rows
    check_plan(decoder, plan, rows)
    schedule, cut = schedule_and_cut(
        plan.schedule,
        costs_for_cut(decoder, plan),
        ranks=plan.pp,
        microbatches=plan.microbatches,
        chunks=plan.chunks,
        limit=plan.memory_limit,
        cut=plan.layers_per_stage,
    )
    shape = MicrobatchShape(decoder, plan, rows / plan.microbatches, on_cpu=not machine.overlaps)
    return prediction_of(shape, machine, schedule, cut)


def prediction_of(
    shape: MicrobatchShape, hardware: Hardware, schedule: Schedule, cut: tuple[int, ...]
) -> Prediction:
    """Return the predicted time and memory of a step whose schedule and layers per stage are given."""
    plan, decoder = shape.plan, shape.decoder
    stages, modes = stage_kinds(decoder.kinds, cut), stage_modes(plan, cut)
    timer = LayerTimer(shape, hardware, shape.precision)
    memory = predicted_memory(shape, schedule, stages, modes, hardware.reserved)
    times = StepTimes(timer, schedule, stages, modes)
    rows = round(shape.rows * plan.microbatches)
    return Prediction(plan, decoder, hardware, rows, cut, times, memory)


def costs_for_cut(model: Decoder, plan: Plan) -> LayerCosts:
    """Return the costs by which `parallelize` cuts a model into stages, where none are given."""
    costs = LayerCosts.evenly(model.layer_costs)
    if plan.loss_rows is not None:
        costs = costs.in_input_gradient(-1, model.hidden * model.vocab)
    return costs.with_messages(plan.pp)


def check_plan(model: Decoder, plan: Plan, rows: int) -> None:
    """Raise PlanError where the model or the rows cannot be divided as the plan says."""
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < plan.microbatches:
        raise PlanError(
            f"rows is {rows!r}, and plan.microbatches is {plan.microbatches}: give at least one row for each "
            "micro-batch."
        )
    if plan.tp > model.heads:
        raise PlanError(f"plan.tp = {plan.tp} is more than model.heads = {model.heads}: lower plan.tp.")
    layers = len(model.kinds)
    if isinstance(plan.recompute, tuple) and len(plan.recompute) != layers:
        raise PlanError(
            f"plan.recompute has {len(plan.recompute)} values, but the model has {layers} layers: "
            "give one value per layer, or one for all."
        )
