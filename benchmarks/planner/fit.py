"""Fits the efficiencies of the hardware files on the `fit` rows of `published.json`, and prints them.

    .venv/bin/python benchmarks/planner/fit.py [a100|h100|b200]

No row of `judge` is read. Every fit starts from `START`, whatever the files hold, and takes the same steps,
so that it prints the same figures each time; a test compares them with the files. Pipelines are simulated
once a round; within a round, the ratio of a step to the work of the rank that ends last is kept, so that a
step is as cheap as its layers. The loss is the mean over tables of the mean |log(predicted / measured)|,
which a few odd runs do not dominate; Nelder and Mead's method finds a minimum, and figures have three digits.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, floor, log
from statistics import median

from cases import cases
from layer_cases import layer_ratios
from machines import JEAN_ZAY_RESERVED, clusters
from runs import Case

from plait.estimate.time.hardware import Hardware
from plait.estimate.time.step_times import StepTimes, gradient_sum_seconds, optimizer_seconds

GROUPS = {
    "a100": (
        ("a100-40", "a100-80", "jean-zay", "vtrain", "vtrain-host"),
        (
            *("product", "half_depth", "attention", "memory", "kernel"),
            *("jean-zay:across", "vtrain-host:host", "vtrain-host:inside"),
        ),
    ),
    # Without torchtitan's runs, whose products in fp8 and compiled kernels would distort the figures.
    "h100": (("h100-sxm", "h100-triton"), ("product", "half_depth", "h100-triton:attention")),
    "b200": (("b200-sxm",), ("product", "half_depth", "attention", "inside")),
}
"""Clusters that share a device, and the figures that are fitted; `cluster:figure` is one cluster's own."""
START = {
    "product": 0.7,
    "half_depth": 100.0,
    "attention": 0.4,
    "memory": 0.75,
    "kernel": 4e-6,
    "inside": 0.6,
    "across": 0.3,
    "host": 5e-5,
}
"""Where each fit starts."""
ROUNDS, STEPS, DIGITS = 2, 120, 3
RANGES = {"kernel": (2e-6, 5e-6), "host": (2e-6, 80e-6), "half_depth": (30.0, 400.0), "memory": (0.5, 0.95)}
"""What is physically possible; other figures are fractions from 0.2 to 0.98."""
FRACTIONS = 0.2, 0.98
BACKWARD = 0.8
"""Rate of the backward of fused attention beside its forward, as Dao 2023 (arXiv:2307.08691) measured it."""


def changed(
    machines: Mapping[str, Hardware], names: Sequence[str], values: Mapping[str, float]
) -> dict[str, Hardware]:
    """Return machines of which those in `names` have the figures `values`."""
    found = dict(machines)
    for name in names:
        own = {figure: value for figure, value in values.items() if ":" not in figure}
        own |= {key.split(":")[1]: value for key, value in values.items() if key.startswith(f"{name}:")}
        found[name] = replace(found[name], efficiency=replace(found[name].efficiency, **own))
    return found


class Linearised:
    """A case whose time is that of one rank's work, multiplied by the ratio that a simulation gave."""

    def __init__(self, case: Case, machines: Mapping[str, Hardware]) -> None:
        self.case = case
        self.setup = case.setup(machines)
        assert case.measured is not None
        self.measured = case.measured
        step = self.setup.step(machines)
        sums = [gradient_sum_seconds(step.timer, work) for work in step.work]
        self.rank = max(range(len(step.ends)), key=lambda rank: step.ends[rank] + sums[rank])
        self.kinds = Counter(
            pair
            for stage in step.schedule.stages_of(self.rank)
            for pair in zip(step.stages[stage], step.modes[stage], strict=True)
        )
        self.ratio = step.ends[self.rank] / self.work(step)

    def work(self, step: StepTimes) -> float:
        """Return the seconds of the rank's layers for one micro-batch, with its messages."""
        layers = sum(count * step.timer.times(*pair).total.total for pair, count in self.kinds.items())
        return layers + 2 * step.timer.message_seconds

    def seconds(self, machines: Mapping[str, Hardware]) -> float:
        """Return the step time."""
        step = self.setup.step(machines)
        own = step.work[self.rank]
        after = sum(optimizer_seconds(step.timer, own.parameters))
        return self.ratio * self.work(step) + gradient_sum_seconds(step.timer, own) + after


def errors(
    machines: Mapping[str, Hardware], chosen: Sequence[Linearised], device: str
) -> dict[str, list[float]]:
    """Return log(predicted / measured) of each case, by table."""
    found = defaultdict(list)
    for one in chosen:
        found[one.case.table].append(log(one.seconds(machines) / one.measured))
    if device == "a100":
        for table, predicted, measured in layer_ratios("fit", machines["a100-80"]):
            found[table].append(log(predicted / measured))
    return dict(found)


def loss(found: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over tables of the mean absolute error."""
    means = [sum(map(abs, values)) / len(values) for values in found.values()]
    return sum(means) / len(means)


def minimum(function: Callable[[list[float]], float], start: list[float], steps: int) -> list[float]:
    """Return where Nelder and Mead's method (1965) ends after `steps` steps from `start`."""
    points = [start] + [
        [value + (0.25 if i == j else 0.0) for j, value in enumerate(start)] for i in range(len(start))
    ]
    ranked = sorted((function(point), point) for point in points)
    for _ in range(steps):
        worst, point = ranked[-1]
        centre = [sum(p[i] for _, p in ranked[:-1]) / (len(ranked) - 1) for i in range(len(start))]

        def along(
            factor: float, centre: list[float] = centre, point: list[float] = point
        ) -> tuple[float, list[float]]:
            moved = [c + factor * (p - c) for c, p in zip(centre, point, strict=True)]
            return function(moved), moved

        tried = along(-1.0)
        if tried[0] < ranked[0][0]:
            tried = min(tried, along(-2.0))
        elif tried[0] >= ranked[-2][0]:
            tried = min(tried, along(0.5))
        if tried[0] < worst:
            ranked[-1] = tried
        else:
            best = ranked[0][1]
            ranked[1:] = [
                (function(moved), moved)
                for moved in (
                    [(b + p) / 2 for b, p in zip(best, point, strict=True)] for _, point in ranked[1:]
                )
            ]
        ranked.sort()
    return ranked[0][1]


def fit(device: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the figures of a device by name, with three digits, and the errors of each table with them."""
    names, figures = GROUPS[device]
    machines = clusters()
    chosen = [case for case in cases("fit") if case.setups[0].cluster in names]

    def values(point: Sequence[float], digits: int = 16) -> dict[str, float]:
        found = {}
        for name, raw in zip(figures, point, strict=True):
            least, most = _range(name)
            found[name] = _rounded(least + (most - least) / (1 + exp(-raw)), digits)
            if name.endswith("attention"):
                found[f"{name}_backward"] = _rounded(BACKWARD * found[name], digits)
        return found

    point = []
    for name in figures:
        least, most = _range(name)
        part = (START[name.split(":")[-1]] - least) / (most - least)
        point.append(log(part / (1 - part)))
    for _ in range(ROUNDS):
        current = changed(machines, names, values(point))
        linear = [Linearised(case, current) for case in chosen]
        point = minimum(
            lambda tried, linear=linear: loss(
                errors(changed(machines, names, values(tried)), linear, device)
            ),
            point,
            STEPS,
        )
    found = values(point, DIGITS)
    return found, errors(changed(machines, names, found), linear, device)


def reserved() -> float:
    """Return the bytes of BigScience's processes that are not predicted as allocated, in tenths of a GiB.

    The median of the runs whose bytes are known, or less: every run that did not fail left room for it.
    """
    machines = clusters()
    found = [
        case.bytes - case.setup(machines).allocated(machines)
        for case in cases("fit")
        if case.counts_reserved and case.bytes is not None
    ]
    room = (
        machines[case.setups[0].cluster].memory - case.setup(machines).allocated(machines)
        for case in cases("fit")
        if case.counts_reserved
    )
    return floor(10 * min(median(found), *room) / 2**30) / 10 * 2**30


def frozen(device: str) -> dict[str, float]:
    """Return the figures that `fit` gives, as the files and `machines.FITTED` hold them."""
    names, figures = GROUPS[device]
    machines, found = clusters(), {}
    for name in figures:
        cluster, _, figure = name.rpartition(":")
        part = machines[cluster or names[0]].efficiency
        for suffix in ("", "_backward") if figure == "attention" else ("",):
            found[name + suffix] = _rounded(getattr(part, figure + suffix), DIGITS)
    return found


def _range(name: str) -> tuple[float, float]:
    return RANGES.get(name.split(":")[-1], FRACTIONS)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def main(devices: Sequence[str]) -> None:
    """Fit devices and print their figures and errors."""
    for device in devices:
        found, tables = fit(device)
        print(device, found, "as frozen" if found == frozen(device) else f"frozen: {frozen(device)}")
        for table, ratios in tables.items():
            mean, bias = sum(map(abs, ratios)) / len(ratios), sum(ratios) / len(ratios)
            print(f"  {table:<26} {len(ratios):>3} rows, mean |log| {mean:.1%}, bias {bias:+.1%}", flush=True)
    print(f"jean-zay: {reserved() / 2**30:g} GiB reserved, frozen: {JEAN_ZAY_RESERVED / 2**30:g}")


if __name__ == "__main__":
    main(sys.argv[1:] or [*GROUPS])
