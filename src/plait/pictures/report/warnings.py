"""Warnings of a report: those that a run printed, and conclusions from its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from plait.pictures.quantities import bytes_text, microbatches_text, seconds_text
from plait.pictures.report.metrics import typical
from plait.pictures.report.run_record import RunRecord
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, policy_schedule
from plait.schedules.timed_schedule import simulated

SLOWER = 1.25
"""A rank is a straggler if it is busy so many times as long as a typical rank with the same layers …"""
SLOWER_OF_STEP = 0.02
"""… and the difference is at least this part of a step."""
UNEVEN = 1.3
"""A rank of `pp` has too much to do if it computes for so many times as long as the mean of them."""
LARGE_BUBBLE = 0.25
LONG_DATA = 0.2
"""Parts of a step from which a warning tells of it."""
_MOST_LISTED = 6


def warnings_of(run: RunRecord) -> Iterator[str]:
    """Yield warnings about a run, one sentence each, the most serious first."""
    if run.end is not None and run.end.kind == "failed":
        yield f"The run failed: {_sentence(run.end.text)}"
    elif run.died:
        yield (
            f"The run ended without saying why, after step {run.metrics.steps[-1]:,}: its process was "
            "killed, or its machine went down."
        )
    for event in run.events:
        if event.kind == "warning":
            yield f"After step {event.step:,}: {_sentence(event.text)}"
    yield from _skipped(run)
    yield from _stragglers(run)
    yield from _uneven_stages(run)
    yield from _bubble(run)
    yield from _data(run)
    yield from _memory(run)
    if run.metrics.damaged:
        yield f"{run.metrics.damaged} damaged lines of the metrics were left out."


def _skipped(run: RunRecord) -> Iterator[str]:
    norms = run.metrics.columns.get("grad_norm", ())
    skipped = [step for step, norm in zip(run.metrics.steps, norms, strict=False) if norm is None]
    if skipped:
        listed = ", ".join(f"{step:,}" for step in skipped[:_MOST_LISTED])
        more = " …" if len(skipped) > _MOST_LISTED else ""
        yield (
            f"{len(skipped)} steps changed no parameter, because gradients overflowed in fp16: "
            f"{listed}{more}. A few at the start are normal: the loss scale is halved each time."
        )


def stragglers(run: RunRecord) -> list[tuple[int, float, float]]:
    """Return ranks that others wait for, with their busy seconds per step and those of comparable ranks.

    Ranks are compared with those that have the same layers, by the median over the later half of the steps.
    Empty where busy times were not measured, as on GPUs.
    """
    rows = dict(zip(run.metrics.steps, run.metrics.columns.get("step_seconds", ()), strict=False))
    if run.ranks is None or run.description is None or run.ranks.world != run.description.world:
        return []
    seconds = [rows.get(step) for step in run.ranks.steps]
    busy = run.ranks.busy(seconds)
    if busy is None:
        return []
    each, alike = typical(busy), run.description.world // run.description.mesh["pp"]
    step = typical([[one or 0.0] for one in seconds])[0]
    found = []
    for first in range(0, len(each), alike):
        peers = sorted(each[first : first + alike])
        usual = peers[(len(peers) - 1) // 2]
        for rank in range(first, first + alike):
            if each[rank] > SLOWER * usual and each[rank] - usual > SLOWER_OF_STEP * step:
                found.append((rank, each[rank], usual))
    return found


def _stragglers(run: RunRecord) -> Iterator[str]:
    for rank, own, usual in stragglers(run)[:_MOST_LISTED]:
        yield (
            f"Rank {rank} is slower than its peers: it computes for {seconds_text(own)} a step, ranks with "
            f"the same layers for {seconds_text(usual)}, and wait for it."
        )


def _uneven_stages(run: RunRecord) -> Iterator[str]:
    """Yield a sentence where a rank of `pp` computes for much longer than the mean of them."""
    if run.step is None or max(run.step.stage_ranks) == 0:
        return
    computing = [uses["computing"] for _, uses in run.step.uses()]
    each = len(computing) // (max(run.step.stage_ranks) + 1)
    stages = [fmean(computing[first : first + each]) for first in range(0, len(computing), each)]
    longest = max(range(len(stages)), key=stages.__getitem__)
    if stages[longest] > UNEVEN * fmean(stages):
        yield (
            f"The stages are uneven: pp {longest} computes for {seconds_text(stages[longest])} of step "
            f"{run.step.step:,}, the ranks of pp on average for {seconds_text(fmean(stages))}. Leave out "
            "layers_per_stage, or cut by measured times: parallel.balance measured, "
            "plait.estimate.measurement.measured_balance.balance."
        )


def _bubble(run: RunRecord) -> Iterator[str]:
    """Yield a sentence where the schedule leaves much of the time unused even if all stages are even."""
    step = run.step
    if step is None or step.policy not in POLICIES:
        return
    ranks = max(step.stage_ranks) + 1
    if step.microbatches >= 4 * ranks:
        return  # a large bubble is impossible, and a long schedule takes seconds to simulate
    chunks = len(step.stage_ranks) // ranks
    now, more = (
        simulated(policy_schedule(step.policy, ranks, count, chunks), Costs()).bubble
        for count in (step.microbatches, 4 * ranks)
    )
    if now > LARGE_BUBBLE:
        yield (
            f"With {microbatches_text(step.microbatches)} on {ranks} ranks of pp, {step.policy} leaves "
            f"{now:.0%} of the time unused even if the stages are even: with microbatches = {4 * ranks} it "
            f"would be {more:.0%}."
        )


def _data(run: RunRecord) -> Iterator[str]:
    """Yield a sentence where steps wait for their batch for long."""
    waits, steps = run.metrics.numbers("data_seconds"), run.metrics.numbers("step_seconds")
    if waits and steps and median(waits) > LONG_DATA * median(steps):
        yield (
            f"A step waits {seconds_text(median(waits))} of {seconds_text(median(steps))} for its data: read "
            "them in worker processes (plait.Loader(…, workers=2)), or prepare them before the run."
        )


def _memory(run: RunRecord) -> Iterator[str]:
    about, peak = run.description, run.metrics.last("peak_memory_bytes")
    if about is None or not about.accelerated or about.predicted_memory is None or peak is None:
        return
    if peak > 1.1 * about.predicted_memory:
        yield (
            f"A rank allocated {bytes_text(peak)} of tensors, {peak / about.predicted_memory - 1:.0%} "
            f"more than the {bytes_text(about.predicted_memory)} that were predicted."
        )


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
