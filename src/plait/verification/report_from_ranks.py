"""What every rank found, put together: one report, and the first difference of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plait.plan import Plan
from plait.verification.diagnosis import Symptoms, likely_cause
from plait.verification.findings import Tally
from plait.verification.location import Location, StepPhase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome
from plait.verification.report import FirstDifference, VerificationReport


def build_report(outcomes: Sequence[RankOutcome], plan: Plan, options: VerifyOptions) -> VerificationReport:
    """Put together what every rank of `plan` found."""
    paths = outcomes[0].paths
    tallies: dict[StepPhase, Tally] = {}
    for phase in StepPhase:
        own = [outcome.findings.tallies[phase] for outcome in outcomes if phase in outcome.findings.tallies]
        if own:
            tallies[phase] = Tally(
                sum(tally.compared for tally in own),
                sum(tally.different for tally in own),
                max(tally.used for tally in own),
                max(tally.relative for tally in own),
                sum(tally.vague for tally in own),
            )
    first = _first(outcomes, plan, paths)
    others = (
        ()
        if first is None
        else tuple(
            sorted(
                (
                    difference
                    for outcome in outcomes
                    for difference in outcome.findings.differences
                    if difference.location != first.difference.location
                ),
                key=lambda difference: difference.location.order(len(paths)),
            )
        )
    )
    return VerificationReport(
        plan=plan,
        options=options,
        clip=outcomes[0].clip,
        tallies=tallies,
        first=first,
        others=others,
        paths=paths,
        seconds=max(outcome.seconds for outcome in outcomes),
    )


def _first(outcomes: Sequence[RankOutcome], plan: Plan, paths: Sequence[str]) -> FirstDifference | None:
    wrong = [outcome for outcome in outcomes if outcome.findings.evidence is not None]
    if not wrong:
        return None

    def order(outcome: RankOutcome) -> tuple[Any, ...]:
        assert outcome.findings.evidence is not None
        return outcome.findings.evidence.location.order(len(paths)), outcome.rank

    chosen = min(wrong, key=order)
    difference = chosen.findings.differences[0]
    evidence = {
        outcome.rank: outcome.findings.evidence
        for outcome in wrong
        if outcome.findings.evidence is not None and outcome.findings.evidence.location == difference.location
    }
    alike = [outcome.rank for outcome in wrong if _begins_alike(outcome, difference.location)]
    found = [outcomes[rank].findings.differences[0].inside for rank in evidence]
    earliest = min((one for one in found if one is not None), key=lambda one: one.order, default=None)
    symptoms = Symptoms(
        difference=replace(difference, inside=earliest),
        evidence=evidence,
        coordinates=[outcome.coordinate for outcome in outcomes],
        judges=[
            outcome.rank
            for outcome in outcomes
            if _compares(outcome, chosen, difference.location)
            and (outcome.rank in evidence or outcome.rank not in alike)
        ],
        plan=plan,
        divided=_is_divided(outcomes, difference.location),
    )
    layer = difference.location.layer
    return FirstDifference(
        difference=difference,
        ranks=tuple(alike),
        coordinates=tuple(dict(outcomes[rank].coordinate) for rank in alike),
        layer=paths[layer] if layer is not None and 0 <= layer < len(paths) else "",
        cause=likely_cause(symptoms),
    )


def _begins_alike(outcome: RankOutcome, location: Location) -> bool:
    """Whether a rank's first difference is at this place, but for the parameter: it may have none of that."""
    assert outcome.findings.evidence is not None
    return replace(outcome.findings.evidence.location, name=location.name) == location


def _is_divided(outcomes: Sequence[RankOutcome], location: Location) -> bool:
    """Whether the layer of a place, or of the model any, has a parameter that is cut over `tp`."""
    divided = {layer for outcome in outcomes for layer in outcome.findings.divided}
    return bool(divided) if location.layer is None else location.layer in divided


def _compares(outcome: RankOutcome, chosen: RankOutcome, location: Location) -> bool:
    """Whether a rank has the same stage, for a micro-batch the same data, and elements to compare."""
    if location.phase is StepPhase.BATCH:
        return outcome is chosen
    if location in outcome.findings.empty:
        return False
    axes = ("pp",) if location.microbatch is None else ("pp", "replicate", "shard")
    return all(outcome.coordinate[axis] == chosen.coordinate[axis] for axis in axes)
