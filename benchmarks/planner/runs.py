"""`Case`: a published run, with what is predicted of it; and the rows of `published.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework_memory import FrameworkMemories
from framework_times import FrameworkTimes, quick_step
from frameworks import Framework

from plait.estimate.time.hardware import Hardware
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan
from plait.schedules.held_microbatches import HeldMicrobatches
from plait.schedules.search.schedule_by_policy import schedule
from plait.schedules.search.stage_cuts import balance

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Setup:
    """A model and a plan as a published run had them."""

    model: Decoder
    plan: Plan
    rows: int
    cluster: str
    framework: Framework

    def step_seconds(self, machines: Mapping[str, Hardware]) -> float:
        """Return the step time, as the search for plans computes it."""
        return self.step(machines).seconds

    def step(self, machines: Mapping[str, Hardware]) -> FrameworkTimes:
        """Return the times of which the step consists."""
        cut = self.plan.layers_per_stage or (len(self.model.kinds),)
        return quick_step(self.model, self.plan, cut, self.rows, self.framework, machines[self.cluster])

    def allocated(self, machines: Mapping[str, Hardware]) -> float:
        """Return the largest allocated bytes of a rank."""
        step, plan = self.step(machines), self.plan
        count = min(plan.microbatches, 4 * plan.pp)
        order = schedule(plan.schedule, ranks=plan.pp, microbatches=count, chunks=plan.chunks)
        shape = step.timer.shape
        known = FrameworkMemories(shape, order, step.stages, step.modes, framework=self.framework)
        ranks = map(known.activations, HeldMicrobatches(order).ranks)
        return max(rank.with_state(shape, 0.0).allocated for rank in ranks)

    def fits(self, machines: Mapping[str, Hardware]) -> bool:
        """Return whether it is predicted to fit."""
        machine = machines[self.cluster]
        return self.allocated(machines) + machine.reserved <= machine.memory


@dataclass(frozen=True)
class Case:
    """One published run: what is predicted, and what was measured."""

    table: str
    measured: float | None
    """Step seconds; None: out of memory."""
    setups: tuple[Setup, ...]
    """Several where the micro-batch size, or what is recomputed, is not published, see `setup`."""
    bytes: float | None = None
    """Measured peak bytes of a device."""
    counts_reserved: bool = False
    """Whether the bytes are those of the whole process, with all libraries, as nvidia-smi shows them."""

    def setup(self, machines: Mapping[str, Hardware]) -> Setup:
        """Return the fastest setup that fits, as the authors took the best; if none fits, the fastest."""
        if len(self.setups) == 1:
            return self.setups[0]
        fitting = [one for one in self.setups if one.fits(machines)]
        return min(fitting or self.setups, key=lambda one: one.step_seconds(machines))

    def memory(self, machines: Mapping[str, Hardware]) -> float:
        """Return what is comparable with the measured bytes."""
        setup = self.setup(machines)
        reserved = machines[setup.cluster].reserved if self.counts_reserved else 0.0
        return setup.allocated(machines) + reserved

    def fits(self, machines: Mapping[str, Hardware]) -> bool:
        """Return whether the run is predicted to fit."""
        return self.setup(machines).fits(machines)

    def step_seconds(self, machines: Mapping[str, Hardware]) -> float:
        """Return the predicted step time."""
        return self.setup(machines).step_seconds(machines)


def tables() -> dict[str, Any]:
    """Return the published tables by name."""
    return json.loads((FOLDER / "published.json").read_text())


def records(table: str, part: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part, `fit` or `judge`, of a table."""
    found = tables()[table]
    for row in found[part]:
        yield dict(zip(found["columns"], row, strict=True))


def gpt(row: Mapping[str, Any], **more: Any) -> Decoder:
    """Return the sizes of a GPT."""
    sizes = {name: row[name] for name in ("hidden", "layers", "heads", "context")}
    return Decoder(vocab=row.get("vocab") or 51200, biases=True, positions=True, tied=True, **sizes, **more)


def even_blocks(model: Decoder, stages: int) -> tuple[int, ...]:
    """Return layers per stage: whole blocks divided evenly, the embedding first and the head last."""
    counts = balance([1.0] * model.layers, stages)
    layers = [2 * count for count in counts]
    layers[0] += 1
    layers[-1] += 1
    return tuple(layers)
