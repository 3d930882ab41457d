"""Builds the report of a verification from the outcomes of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.plan.plan import Plan
from plait.verification.diagnosis.cause import likely_cause
from plait.verification.diagnosis.symptoms import Symptoms
from plait.verification.findings import Tally
from plait.verification.location import Location, StepPhase
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome
from plait.verification.report import FirstDifference, VerificationReport


def build_report(outcomes: Sequence[RankOutcome], plan: Plan, options: VerifyOptions) -> VerificationReport:
    """Return the report on `plan` from the outcomes of all its ranks, rank 0 first."""
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
    first = _first_difference(outcomes, plan, paths)
    others = [
        difference
        for outcome in outcomes
        for difference in outcome.findings.differences
        if first is not None and difference.location != first.difference.location
    ]
    return VerificationReport(
        plan=plan,
        options=options,
        clip=outcomes[0].clip,
        tallies=tallies,
        first=first,
        others=tuple(sorted(others, key=lambda difference: difference.location.order(len(paths)))),
        paths=paths,
        left_out=outcomes[0].findings.left_out,
        seconds=max(outcome.seconds for outcome in outcomes),
    )


def _first_difference(
    outcomes: Sequence[RankOutcome], plan: Plan, paths: Sequence[str]
) -> FirstDifference | None:
    evidence = {o.rank: o.findings.evidence for o in outcomes if o.findings.evidence is not None}
    if not evidence:
        return None
    chosen = min(evidence, key=lambda rank: (evidence[rank].location.order(len(paths)), rank))
    difference = outcomes[chosen].findings.differences[0]
    location = difference.location
    same = {rank: own for rank, own in evidence.items() if own.location == location}
    # Those whose first difference is at the location, possibly in another parameter.
    alike = {rank: replace(own.location, name=location.name) == location for rank, own in evidence.items()}
    ranks = tuple(rank for rank in evidence if alike[rank])
    inside = [outcomes[rank].findings.differences[0].inside for rank in same]
    earliest = min((one for one in inside if one is not None), key=lambda one: one.order, default=None)
    symptoms = Symptoms(
        difference=replace(difference, inside=earliest),
        evidence=same,
        coordinates=[outcome.coordinate for outcome in outcomes],
        compared_on=[
            outcome.rank
            for outcome in outcomes
            if _compares(outcome, outcomes[chosen], location)
            and (outcome.rank in same or outcome.rank not in ranks)
        ],
        plan=plan,
        partitioned=_is_partitioned(outcomes, location),
    )
    layer = location.layer
    return FirstDifference(
        difference=difference,
        ranks=ranks,
        coordinates=tuple(dict(outcomes[rank].coordinate) for rank in ranks),
        layer=paths[layer] if layer is not None and 0 <= layer < len(paths) else "",
        cause=likely_cause(symptoms),
    )


def _is_partitioned(outcomes: Sequence[RankOutcome], location: Location) -> bool:
    """Return whether a location's layer (any layer if it has none) has a parameter partitioned over `tp`."""
    layers = {layer for outcome in outcomes for layer in outcome.findings.partitioned}
    return bool(layers) if location.layer is None else location.layer in layers


def _compares(outcome: RankOutcome, chosen: RankOutcome, location: Location) -> bool:
    """Return whether a rank compares the tensor, or a piece of it, that `chosen` compares at `location`."""
    if location.phase is StepPhase.BATCH:
        return outcome is chosen
    if location in outcome.findings.empty:
        return False
    axes = ("pp",) if location.microbatch is None else ("pp", "replicate", "shard")
    return all(outcome.coordinate[axis] == chosen.coordinate[axis] for axis in axes)
