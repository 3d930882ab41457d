"""The report of a verification: equal or not, the largest differences, and the first difference."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.plan.plan import Plan
from plait.verification.findings import Difference, Tally
from plait.verification.options import VerifyOptions
from plait.verification.step_location import Location, StepPhase

WIDTH = 80
ROWS = 6
"""Differing phases that are listed; later ones are only counted."""
LISTED = 5
"""Further locations that are listed with `isolate`."""


@dataclass(frozen=True)
class FirstDifference:
    """The earliest difference over all ranks; all earlier tensors are equal."""

    difference: Difference
    ranks: tuple[int, ...]
    """The ranks whose first difference has this location, or that of another parameter in its place."""
    coordinates: tuple[dict[str, int], ...]
    layer: str
    """Path of the layer."""
    cause: str


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification. Its truth value is whether the runs are equal; `print` shows it."""

    plan: Plan
    options: VerifyOptions
    clip: float
    tallies: dict[StepPhase, Tally]
    first: FirstDifference | None
    others: tuple[Difference, ...]
    paths: tuple[str, ...]
    seconds: float
    left_out: str = ""
    """Why the candidate was not saved and loaded, though that was to be compared."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.equal

    @property
    def compared(self) -> int:
        """Number of compared tensors, over all ranks."""
        return sum(tally.compared for tally in self.tallies.values())

    @property
    def different(self) -> int:
        """Number of tensors whose differences are larger than rounding explains."""
        return sum(tally.different for tally in self.tallies.values())

    @property
    def vague(self) -> int:
        """Number of equal tensors whose tolerance exceeds half of their magnitude: equality proves little."""
        return sum(tally.vague for tally in self.tallies.values())

    @property
    def used(self) -> float:
        """Largest difference within tolerance, as a fraction of that tolerance: at most 1."""
        return max((tally.used for tally in self.tallies.values()), default=0.0)

    def __str__(self) -> str:
        return "\n".join([self.headline(), "", *self._details(), "", *_table(self.tallies)])

    def headline(self) -> str:
        """Return one line: equal or not, and the largest differences."""
        if self.first is None:
            if self.options.mode == "exact":
                return f"EQUAL to one rank, bit by bit: {self.compared:,} tensors compared."
            worst = max(tally.relative for tally in self.tallies.values())
            vague = f" {self.vague:,} of them are vague: rounding explains half of their size."
            return (
                f"EQUAL to one rank: {self.compared:,} tensors differ by at most {worst:.1e} of their size, "
                f"{self.used:.0%} of what rounding explains.{vague if self.vague else ''}"
            )
        difference = self.first.difference
        relative = difference.largest / difference.size if difference.size else float("inf")
        return (
            f"NOT EQUAL to one rank: {self.what(difference.location)} differs by {relative:.1e} of its size."
        )

    def what(self, location: Location) -> str:
        """Return the phase and layer of a location as text: `the forward of blocks.1.mlp`."""
        layer, name = self.path_of(location), location.name
        if layer and name and location.phase is StepPhase.WEIGHT_GRADIENT:
            layer = f"{name} in {layer}"
        return f"the {location.phase}" + (f" of {layer or name}" if layer or name else "")

    def path_of(self, location: Location) -> str:
        """Return the path of a location's layer; "" without a layer, `the batch` for the model's input."""
        if location.layer is None:
            return ""
        return self.paths[location.layer] if 0 <= location.layer < len(self.paths) else "the batch"

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON values; see docs/reference/command-line.md."""
        return {
            "equal": self.equal,
            "mode": self.options.mode,
            "plan": asdict(self.plan),
            "steps": self.options.steps,
            "clip": finite(self.clip),
            "compared": self.compared,
            "different": self.different,
            "vague": self.vague,
            "used": self.used,
            "left_out": self.left_out or None,
            "seconds": self.seconds,
            "phases": {str(phase): asdict(tally) for phase, tally in self.tallies.items()},
            "first": self.first
            and {
                **self._as_json(self.first.difference),
                "ranks": list(self.first.ranks),
                "coordinates": list(self.first.coordinates),
                "cause": self.first.cause,
            },
            "others": [self._as_json(other) for other in self.others],
        }

    def _as_json(self, difference: Difference) -> dict[str, Any]:
        location = difference.location
        return {
            "step": location.step,
            "evaluating": location.evaluating,
            "phase": str(location.phase),
            "layer": self.path_of(location) or None,
            "parameter": location.name or None,
            "tensor": location.tensor,
            "microbatch": location.microbatch,
            "largest": finite(difference.largest),
            "size": finite(difference.size),
            "allowed": finite(difference.allowed),
            "shape": list(difference.shape),
            "box": [list(bounds) for bounds in difference.box],
            "index": list(difference.worst),
            "actual": finite(difference.values[0]),
            "expected": finite(difference.values[1]),
        }

    def _details(self) -> list[str]:
        plan, options = self.plan, self.options
        steps = "1 step" if options.steps == 1 else f"{options.steps} steps"
        clipped = f", clipped to {self.clip:.3g}" if math.isfinite(self.clip) else ""
        formats = f" ({formats_in(plan)})" if options.mode == "native" and formats_in(plan) else ""
        run = f"{options.mode}{formats}, {plan.microbatches} micro-batches, {steps}{clipped}"
        layout = layout_of(options.applied_to(plan))
        lines = [titled("plan", f"{layout}, {plan.schedule}; {run}; {self.seconds:.1f} s")]
        if self.left_out:
            lines.append(titled("left out", f"save and load: {self.left_out}"))
        if self.first is None:
            return lines
        first, difference = self.first, self.first.difference
        location = difference.location
        number = "" if location.microbatch is None else f", micro-batch {location.microbatch}"
        subject = self._subject(location)
        lines += [
            titled("first", f"{when(location)}, {location.phase}{number}{subject and f': {subject}'}"),
            titled("on", _ranks(first)),
            titled("where", _where(difference)),
            titled("likely", first.cause),
            titled("in all", f"{self.different:,} of {self.compared:,} tensors differ{self._advice()}"),
        ]
        if options.isolate:
            lines += [titled("also", text) for text in self._also()]
        return lines

    def _also(self) -> list[str]:
        """Return the differences after the first as text, one line per phase and layer."""
        kinds: dict[tuple[StepPhase, int | None], set[Location]] = {}
        for other in self.others:
            kinds.setdefault((other.location.phase, other.location.layer), set()).add(other.location)
        lines = []
        for locations in list(kinds.values())[:LISTED]:
            first = min(locations, key=lambda location: location.order(len(self.paths)))
            more = f" and {len(locations) - 1} more" if len(locations) > 1 else ""
            lines.append(f"{self.what(first)}{more}")
        return lines + ([f"{len(kinds) - LISTED} more places"] if len(kinds) > LISTED else [])

    def _subject(self, location: Location) -> str:
        parts = [] if location.layer is None else [f"layer {location.layer}"]
        parts += [path] if (path := self.path_of(location)) else []
        parts += [f"tensor {location.tensor} of its value"] if location.tensor else []
        return ", ".join(parts + ([location.name] if location.name else []))

    def _advice(self) -> str:
        if self.options.isolate:
            return ", each (but in evaluation) by itself: the reference's values were fed downstream"
        return "" if self.different == 1 else "; with isolate only those that differ by themselves would"


def finite(value: float) -> float | None:
    """Return a number as JSON can represent it: None for NaN and infinity."""
    return value if math.isfinite(value) else None


def formats_in(plan: Plan) -> str:
    """Return the precisions and loss scale of a plan as text: `bf16, master fp32, loss scale 1024`."""
    formats: list[str] = [plan.precision or ""]
    for name in ("master", "gradient", "reduce"):
        precision = getattr(plan, f"{name}_precision")
        formats += [f"{name} {precision}"] if precision else []
    formats += [f"loss scale {plan.loss_scale:g}"] if plan.loss_scale else []
    return ", ".join(filter(None, formats))


def layout_of(plan: Plan) -> str:
    """Return degrees, sharding and recomputation of a plan as text: `pp 2 · dp 1 · tp 2 · full`."""
    context = f" · cp {plan.cp}" if plan.cp > 1 else ""
    experts = "".join(f" · {axis} {size}" for axis, size in (("ep", plan.ep), ("etp", plan.etp)) if size > 1)
    layout = f"pp {plan.pp} · dp {plan.dp}{context} · tp {plan.tp}{experts}"
    if plan.replicate > 1:
        layout += f" ({plan.replicate} x {plan.shard})"
    if plan.cp > 1:
        layout += f" · {plan.context_parallel} {plan.context_layout}"
    if plan.strategy != "none":
        layout += f" · {plan.strategy}" + (" each" if plan.reduce == "each" else "")
    if plan.offload != "none":
        layout += f" · offload {plan.offload}"
    if plan.cuts_sequence:
        layout += f" · sequence {plan.sequence_parallel}"
    if plan.loss_rows is not None:
        layout += f" · loss of {plan.loss_rows} rows"
    if not isinstance(plan.recompute, str):
        return f"{layout} · recompute by layer"
    return layout + (f" · recompute {plan.recompute}" if plan.recompute != "none" else "")


def when(location: Location) -> str:
    """Return when in a run a location is, as text: `step 2` or `evaluation after step 2`."""
    return f"evaluation after step {location.step}" if location.evaluating else f"step {location.step + 1}"


def _ranks(first: FirstDifference) -> str:
    places = [" · ".join(f"{axis} {index}" for axis, index in one.items()) for one in first.coordinates]
    shown = [f"rank {rank} ({place})" for rank, place in zip(first.ranks, places, strict=True)]
    return ", ".join(shown[:2]) + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")


def _where(difference: Difference) -> str:
    """Return the differing part of a tensor and its worst element, as text."""
    actual, expected = difference.values
    values = f"{actual:.6g} instead of {expected:.6g}"
    if not difference.shape:
        return values
    if not difference.box:
        return f"all of {list(difference.shape)}"
    shape = list(difference.shape)
    box = ", ".join(f"{start}:{stop}" for start, stop in difference.box)
    part = f"{difference.share:.0%} of {shape}" if difference.whole_box else f"[{box}] of a part {shape}"
    return f"{part}; worst at {list(difference.worst)}: {values}"


def titled(title: str, text: str) -> str:
    """Return `text` with an indented title in front, wrapped to 80 columns: `  title    text`."""
    return textwrap.fill(text, WIDTH, initial_indent=f"  {title:<9}", subsequent_indent=" " * 11)


def _table(tallies: Mapping[StepPhase, Tally]) -> list[str]:
    """Return the table of compared tensors, a line per phase; if any differs, the equal ones share a line."""
    wrong = {phase: tally for phase, tally in tallies.items() if tally.different}
    lines = [f"  {'phase':<22} {'compared':>9} {'different':>9} {'largest':>9}  of what rounding explains"]
    shown = dict(list(wrong.items())[:ROWS]) if wrong else tallies
    lines += [_row(phase, tally) for phase, tally in shown.items()]
    later = [tally for phase, tally in wrong.items() if phase not in shown]
    if later:
        compared, different = sum(tally.compared for tally in later), sum(tally.different for tally in later)
        lines.append(f"  {f'{len(later)} later phases':<22} {compared:>9,} {different:>9,}")
    if wrong:
        equal = [tally for tally in tallies.values() if not tally.different]
        lines.append(f"  {'all others':<22} {sum(tally.compared for tally in equal):>9,} {'-':>9}")
    return lines


def _row(phase: StepPhase, tally: Tally) -> str:
    number = f"{tally.different:,}" if tally.different else "-"
    closeness = f"{tally.relative:>9.1e}  {tally.used:.0%}" if tally.different < tally.compared else ""
    return f"  {phase:<22} {tally.compared:>9,} {number:>9} {closeness}".rstrip()
