"""The rows of a configuration: memory beside what is predicted, tokens a second beside a peer's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from configurations import Configuration
from contestants import Contestant, NoResultError, command_of
from report import Row
from work import Work, build

from plait.app.loop.meter import flops_per_token
from plait.estimate.time.hardware import gpu_peaks

CLOSE = 2e-3
"""How far two losses in bf16 may be apart, relative to their size."""
MEGA = 1e6


@dataclass(frozen=True)
class Measuring:
    """How contestants are run."""

    work: Work
    device: str
    gpu: str
    """Its product name; empty on a CPU."""
    turns: int
    steps: int
    """Of a turn."""
    warm: int
    """Turns that do not count."""
    timeout: float
    """Seconds for each answer."""
    ranks_per_gpu: int
    logs: Path

    def rows(self, one: Configuration, parts: set[str]) -> Iterator[Row]:
        """Yield the rows of one configuration, for the wanted `parts`."""
        with_speed = "speed" in parts and one.peer is not None
        wanted = [part for part in ("memory", "speed") if part in parts and (part == "memory" or with_speed)]
        if not wanted:
            return
        try:
            with ExitStack() as stack:
                ours = stack.enter_context(self._contestant(one, {"plan": one.plan}, "plait"))
                theirs = None
                if with_speed:
                    theirs = stack.enter_context(self._contestant(one, {"peer": one.peer}, "peer"))
                for contestant in (ours, theirs):
                    if contestant is not None:
                        contestant.answers()
                if "memory" in wanted:
                    yield memory_row(one, ours.ask("memory"), theirs.ask("memory") if theirs else [])
                    wanted.remove("memory")
                if theirs is not None:
                    yield self._speed_row(one, ours, theirs)
        except NoResultError as nothing:
            for part in wanted:
                beside = one.peer or "" if part == "speed" else ""
                yield Row(part, one.name, one.ranks, nothing.fate, beside, notes=nothing.line)

    def _contestant(self, one: Configuration, what: dict[str, Any], side: str) -> Contestant:
        name = re.sub(r"\W+", "-", f"{one.ranks} {one.name} {side}")
        work = dataclasses.asdict(self.work)
        command = command_of(what, work, self.device, self.timeout, self.ranks_per_gpu)
        return Contestant(command, one.ranks, self.timeout, self.logs / name)

    def _speed_row(self, one: Configuration, ours: Contestant, theirs: Contestant) -> Row:
        """Let both take turns, so that a change in the machine's speed meets both; return the row."""
        seconds: tuple[list[float], list[float]] = [], []
        losses: list[tuple[float, float]] = []
        for _ in range(self.warm + self.turns):
            said = [contestant.ask(f"steps {self.steps}") for contestant in (ours, theirs)]
            for taken, ranks in zip(seconds, said, strict=True):
                taken.append(max(rank["seconds"] for rank in ranks))
            losses.append((said[0][0]["loss"], said[1][0]["loss"]))
        return speed_row(one, self, *(taken[self.warm :] for taken in seconds), losses)

    def utilization(self, tokens_per_second: float, ranks: int) -> float | None:
        """Return the fraction of the GPUs' peak in bf16, or None where that is unknown."""
        work = self.work
        peak = gpu_peaks(self.gpu).get("bf16")
        sizes = {"layers": work.layers, "hidden": work.hidden, "context": work.context}
        per_token = flops_per_token(build(work), **sizes)
        return None if peak is None else per_token * tokens_per_second / ranks / peak


def memory_row(one: Configuration, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Row:
    """Return the row of the rank of `pp` with the largest prediction; of its ranks the largest peak."""
    predicted = ours[0]["predicted"]
    measured = [max(rank["measured"] for rank in ours if rank["pp"] == pp) for pp in range(len(predicted))]
    fullest = max(range(len(predicted)), key=predicted.__getitem__)
    others = [f"pp {pp}: {measured[pp] / predicted[pp]:.2f}" for pp in range(len(predicted)) if pp != fullest]
    notes = [f"ratio of the other ranks of pp: {', '.join(others)}"] if others else []
    if theirs:
        most = max(rank["measured"] for rank in theirs)
        notes.append(f"{one.peer} takes {most / MEGA:,.1f} MB")
    return Row(
        "memory",
        one.name,
        one.ranks,
        f"{measured[fullest] / MEGA:,.1f} MB",
        f"{predicted[fullest] / MEGA:,.1f} MB predicted",
        measured[fullest] / predicted[fullest],
        "; ".join(notes),
    )


def speed_row(
    one: Configuration,
    measuring: Measuring,
    ours: list[float],
    theirs: list[float],
    losses: list[tuple[float, float]],
) -> Row:
    """Return the row of a pair; `ours` and `theirs` are seconds of a step, turn by turn."""
    tokens = measuring.work.tokens * one.ranks
    speeds = [tokens / median(taken) for taken in (ours, theirs)]
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    notes = [f"each turn {', '.join(f'{ratio:.2f}' for ratio in ratios)}"]
    used = [measuring.utilization(speed, one.ranks) for speed in speeds]
    if None not in used:
        notes.append(f"MFU {' and '.join(f'{share:.0%}' for share in used if share is not None)}")
    apart = [abs(own - other) / abs(other) for own, other in losses]
    if all(gap <= CLOSE for gap in apart):  # not for NaN
        notes.append(f"losses within {max(apart):.0e}")
    else:
        notes.insert(0, f"LOSSES DIFFER: {', '.join(f'{own:.4g} and {other:.4g}' for own, other in losses)}")
    return Row(
        "speed",
        one.name,
        one.ranks,
        f"{speeds[0]:,.0f} tokens/s",
        f"{one.peer}: {speeds[1]:,.0f}",
        median(ratios),
        "; ".join(notes),
    )
