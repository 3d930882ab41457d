"""Judges predictions on the `judge` rows of `published.json`, on which no figure was fitted.

    .venv/bin/python benchmarks/planner/run.py [judge|fit]

Prints a table: errors of step time and of memory, and how well the order of each table's runs is predicted.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from cases import cases
from machines import clusters
from runs import Case, records
from survey import survey

from plait.pictures.timelines.timeline import simulate
from plait.schedules.costs import Costs
from plait.schedules.search.schedule_by_policy import schedule


def errors(found: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return mean absolute, mean and largest absolute relative error of pairs of predicted and measured."""
    relative = [predicted / measured - 1 for predicted, measured in found]
    return sum(map(abs, relative)) / len(found), sum(relative) / len(found), max(map(abs, relative))


def spearman(found: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of predicted and measured."""
    first, second = (_places([pair[side] for pair in found]) for side in (0, 1))
    middle = (len(found) - 1) / 2
    product = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    return product / sum((a - middle) ** 2 for a in range(len(found)))


def _places(values: Sequence[float]) -> list[float]:
    places = [0.0] * len(values)
    for place, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        places[index] = place
    return places


def bubbles(part: str) -> Iterator[tuple[float, float]]:
    """Yield the bubble of each published schedule, simulated and printed, as fractions of the span."""
    for row in records("zero bubble, bubbles", part):
        costs = Costs(F=row["F"], I=row["I"], W=row["W"], comm=row["comm"])
        for policy in ("1f1b", "zb-h1", "zb-h2"):
            made = schedule(policy, ranks=row["pp"], microbatches=row["microbatches"])
            yield simulate(made, costs).bubble_span, row[policy]


def row_of(name: str, times: Sequence[tuple[float, float]], memory: Sequence[tuple[float, float]]) -> str:
    """Return a row of the table."""
    mean, bias, largest = errors(times)
    order = f"{spearman(times):.3f}" if len(times) > 4 else ""
    bytes_ = ""
    if memory:
        mean_bytes, bias_bytes, largest_bytes = errors(memory)
        bytes_ = f"{mean_bytes:.1%} ({bias_bytes:+.1%}), {largest_bytes:.1%}"
    return f"| {name} | {len(times)} | {mean:.1%} | {bias:+.1%} | {largest:.1%} | {order} | {bytes_} |"


def main(part: str) -> None:
    """Print the table of `part`."""
    machines = clusters()
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
    worst: list[tuple[float, Case]] = []
    for case in cases(part):
        seconds = case.step_seconds(machines)
        times[case.table].append((seconds, case.measured))
        worst.append((abs(seconds / case.measured - 1), case))
        if case.bytes is not None:
            memory[case.table].append((case.memory(machines), case.bytes))
    print("| table | runs | mean error of time | bias | largest | Spearman | memory: mean (bias), largest |")
    print("|---|---|---|---|---|---|---|")
    for name, found in times.items():
        print(row_of(name, found, memory[name]))
    found = list(bubbles(part))
    print(f"\nBubbles of {len(found)} schedules: largest difference {max(abs(a - b) for a, b in found):.2%}.")
    print("\nBigScience's survey:\n")
    for sentence in survey(machines):
        print(f"- {sentence}")
    print("\nLargest errors:\n")
    for error, case in sorted(worst, key=lambda pair: -pair[0])[:8]:
        plan, model = case.setups[0].plan, case.setups[0].model
        print(
            f"- {case.table}: {error:.0%}; hidden {model.hidden}, {model.layers} blocks, tp {plan.tp}, "
            f"pp {plan.pp}, dp {plan.dp}, {plan.microbatches} micro-batches"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "judge")
