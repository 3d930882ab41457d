"""Every layout and schedule on a number of ranks, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from plait.plan import Plan
from plait.schedules.search.schedule import NAMES
from plait.verification.layouts import RefusedPlan
from plait.verification.report import VerificationReport, layout_of

SCHEDULE_WIDTH = max(map(len, NAMES))


@dataclass(frozen=True)
class Sweep:
    """What was found for each plan. It is true where all that can be run are equal; `print` it."""

    ranks: int
    rows: tuple[tuple[Plan, VerificationReport | RefusedPlan], ...]

    @property
    def reports(self) -> tuple[VerificationReport, ...]:
        """Of the plans that can be run."""
        return tuple(result for _, result in self.rows if isinstance(result, VerificationReport))

    @property
    def compared(self) -> int:
        """How many tensors, over all plans and ranks: 0 where none of the plans can be run."""
        return sum(report.compared for report in self.reports)

    @property
    def equal(self) -> bool:
        """Whether all that can be run are equal to one rank, and there is one."""
        return bool(self.reports) and all(self.reports)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        width = max((len(layout_of(plan)) for plan, _ in self.rows), default=0)
        lines = [_row(plan, result, width) for plan, result in self.rows]
        return "\n".join([self.headline(), "", *lines])

    def headline(self) -> str:
        """How many are equal, and how closely, in one line."""
        reports, refused = self.reports, len(self.rows) - len(self.reports)
        rest = f" ({refused} more are not possible for this model)" if refused else ""
        wrong = sum(not report for report in reports)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if not reports:
            return f"NOTHING to compare: this model runs by none of {refused} plans on {ranks}."
        if wrong:
            return f"NOT EQUAL to one rank: {wrong} of {len(reports)} plans on {ranks}{rest}."
        used = max(report.used for report in reports)
        closeness = (
            "bit by bit" if reports[0].options.mode == "exact" else f"{used:.0%} of what rounding explains"
        )
        return f"EQUAL to one rank: all {len(reports)} plans on {ranks}, {closeness}{rest}."

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs; see docs/reference/command-line.md."""
        return {
            "equal": self.equal,
            "ranks": self.ranks,
            "plans": [
                {"plan": asdict(plan), "equal": None, "reason": result.reason}
                if isinstance(result, RefusedPlan)
                else result.as_json()
                for plan, result in self.rows
            ],
        }


def _row(plan: Plan, result: VerificationReport | RefusedPlan, width: int) -> str:
    """One plan: layout, what is recomputed, schedule, micro-batches, what came of it."""
    start = f"  {layout_of(plan):<{width}}  {plan.schedule:<{SCHEDULE_WIDTH}}  m {plan.microbatches:<3}"
    if isinstance(result, RefusedPlan):
        return f"{start} not possible: {result.reason}"
    if result.first is not None:
        location = result.first.difference.location
        return f"{start} DIFFERENT  step {location.step + 1}, {result.what(location)}"
    worst = max(tally.relative for tally in result.tallies.values())
    closeness = "" if result.options.mode == "exact" else f"  {worst:.1e}  {result.used:>4.0%}"
    return f"{start} equal{closeness}  {result.seconds:.1f} s"
