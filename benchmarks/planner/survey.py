"""BigScience's survey of layouts as questions to a planner: which layout is fastest, and which do not fit?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from cases import attempts
from runs import Case

from plait.estimate.time.hardware import Hardware

TABLE = "bigscience"


def survey(machines: Mapping[str, Hardware]) -> Iterator[str]:
    """Yield sentences about the survey: layouts that failed, layouts that ran, the choice for each model.

    The choice is the layout that is predicted as the fastest of those that are predicted to fit; it is
    compared with the best that was measured for the same model and optimizer, in seconds for a sequence.
    """
    tried = [case for part in ("fit", "judge") for case in attempts(part) if case.table == TABLE]
    failed = [case for case in tried if case.measured is None]
    ran = [case for case in tried if case.measured is not None]
    flagged = sum(not case.fits(machines) for case in failed)
    kept = sum(case.fits(machines) for case in ran)
    yield f"Of {len(failed)} layouts that ran out of memory, {flagged} are predicted not to fit."
    yield f"Of {len(ran)} layouts that ran, {kept} are predicted to fit."
    models: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in ran:
        setup = case.setups[0]
        models[setup.model, setup.plan.precision].append(case)
    for (model, precision), layouts in models.items():
        fitting = [case for case in layouts if case.fits(machines)]
        if len(layouts) > 1 and fitting:
            chosen = min(fitting, key=lambda case: case.step_seconds(machines) / _rows(case))
            best = min(map(_measured, layouts))
            sizes = f"hidden {model.hidden}, {model.layers} blocks, {model.heads} heads, {precision}"  # type: ignore[attr-defined]
            slower = _measured(chosen) / best - 1
            yield f"{sizes}: the choice of {len(layouts)} layouts is {slower:.1%} slower than the best."


def _rows(case: Case) -> int:
    setup = case.setups[0]
    return setup.rows * setup.plan.dp


def _measured(case: Case) -> float:
    """Return the measured seconds for a sequence."""
    assert case.measured is not None
    return case.measured / _rows(case)
