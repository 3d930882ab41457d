"""The report of a comparison with an independent model: equal or not, and the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.plan.plan import Plan
from plait.verification.report import finite, layout_of, titled

ORDER = ("initial values", "output", "loss", "gradient", "input gradient")
"""What is compared, by dependence."""


@dataclass(frozen=True)
class Compared:
    """How a tensor of the plan's run compares with the reference model's."""

    batch: int
    what: str
    """initial values, output, loss, gradient, or input gradient."""
    name: str
    """Of the parameter in the reference; "" for others."""
    largest: float
    """Largest absolute difference; infinity where only one of the two is NaN."""
    size: float
    allowed: float
    index: tuple[int, ...]
    """Of the largest difference."""
    values: tuple[float, float]
    """Actual and expected value there."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.largest <= self.allowed


@dataclass(frozen=True)
class IndependentReport:
    """The result of a comparison with an independent model. Its truth value is whether all is equal."""

    reference: str
    plan: Plan
    compared_tensors: tuple[Compared, ...]
    """By batch and dependence."""
    unmatched: int
    """Trained parameters of the model without a counterpart in the reference."""
    place: str
    """Sentence about the first module that differs on one rank, or ""."""
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether rounding explains all differences."""
        return self.first is None

    def __bool__(self) -> bool:
        return self.equal

    @property
    def first(self) -> Compared | None:
        """The first difference in order of computation, so that all its inputs were equal; None if none."""
        return next((one for one in self.compared_tensors if not one.equal), None)

    @property
    def compared(self) -> int:
        """Number of compared tensors, over all ranks."""
        return len(self.compared_tensors)

    @property
    def different(self) -> int:
        """Number of tensors whose differences are larger than rounding explains."""
        return sum(not one.equal for one in self.compared_tensors)

    def __str__(self) -> str:
        return "\n".join([self._headline(), "", *self._details(), "", *self._table()])

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON values; see docs/reference/command-line.md."""
        return {
            "equal": self.equal,
            "against": self.reference,
            "plan": asdict(self.plan),
            "compared": self.compared,
            "different": self.different,
            "unmatched": self.unmatched,
            "seconds": self.seconds,
            "phases": {
                what: {"compared": count, "different": wrong, "largest": finite(largest)}
                for what, (count, wrong, largest) in self._phases().items()
            },
            "first": self.first and _as_json(self.first) | {"place": self.place or None},
        }

    def _headline(self) -> str:
        first = self.first
        if first is None:
            worst = max(map(_relative, self.compared_tensors), default=0.0)
            most = f"differ by at most {worst:.1e} of their size"
            return f"EQUAL to {self.reference}: {self.compared:,} tensors {most}."
        return (
            f"NOT EQUAL to {self.reference}: {_named(first)} differs by {_relative(first):.1e} of its size."
        )

    def _details(self) -> list[str]:
        plan, run = self.plan, f"float64, {self.plan.microbatches} micro-batches; {self.seconds:.1f} s"
        lines = [("plan", f"{layout_of(plan)}, {plan.schedule}; {run}")]
        if self.unmatched:
            count = f"{self.unmatched:,} parameter{'s' if self.unmatched > 1 else ''}"
            lines.append(("without", f"the gradients of {count}, which the reference has under no such name"))
        if (first := self.first) is not None:
            at = f"worst at {list(first.index)}: " if first.index else ""
            lines += [
                ("first", f"batch {first.batch + 1}, {_named(first)}"),
                ("where", f"{at}{first.values[0]:.6g} instead of {first.values[1]:.6g}"),
                ("likely", self._cause(first)),
                ("in all", f"{self.different:,} of {self.compared:,} tensors differ"),
            ]
        return [titled(*line) for line in lines]

    def _cause(self, first: Compared) -> str:
        if first.what == "initial values":
            return "the model and the reference do not start from the same values: load the same into both."
        if first.what == "output":
            return (
                self.place or "outputs differ on other ranks than the first: the plan makes the difference."
            )
        if first.what == "loss":
            return "the outputs are equal, and the loss of them is not."
        return "outputs and loss are equal, so it is the backward, or what of it the reference leaves out."

    def _table(self) -> list[str]:
        rows = [f"  {'compared':<22} {'tensors':>9} {'different':>9} {'largest':>9}"]
        for what, (count, wrong, largest) in self._phases().items():
            rows.append(f"  {what:<22} {count:>9,} {wrong or '-':>9} {largest:>9.1e}")
        return rows

    def _phases(self) -> dict[str, tuple[int, int, float]]:
        """Return how many tensors of each kind were compared and differ, and their largest difference."""
        kinds = {what: [one for one in self.compared_tensors if one.what == what] for what in ORDER}
        return {
            what: (len(found), sum(not one.equal for one in found), max(map(_relative, found)))
            for what, found in kinds.items()
            if found
        }


def report_of_all(reports: Sequence[IndependentReport]) -> IndependentReport:
    """Return one report on all ranks, merged from `reports` of each rank, rank 0 first."""
    found = [one for report in reports for one in report.compared_tensors]
    in_order = tuple(sorted(found, key=lambda one: (one.batch, ORDER.index(one.what))))
    return replace(reports[0], compared_tensors=in_order, seconds=max(one.seconds for one in reports))


def _named(one: Compared) -> str:
    return f"the {one.what} of {one.name}" if one.name else f"the {one.what}"


def _relative(one: Compared) -> float:
    return one.largest / one.size if one.size else one.largest


def _as_json(one: Compared) -> dict[str, Any]:
    return {
        "batch": one.batch,
        "what": one.what,
        "parameter": one.name or None,
        "largest": finite(one.largest),
        "size": finite(one.size),
        "allowed": finite(one.allowed),
        "index": list(one.index),
        "actual": finite(one.values[0]),
        "expected": finite(one.values[1]),
    }
