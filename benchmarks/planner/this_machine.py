"""How well are the steps of this machine predicted? Calibrates it, then runs every plan of two ranks.

Prints the table of README.md, section "This machine". On a machine that does nothing else. Even there its
speed changes by a factor of up to two within minutes: steps of a plan take turns with the larger step of the
calibration, and their ratio is multiplied by the seconds which that step took there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, median

import torch

import plait
from plait.errors import PlaitError
from plait.estimate.measurement.calibrate import calibrate
from plait.estimate.measurement.measured_model_steps import LARGE, model_step, predicted_seconds
from plait.estimate.time.hardware import load_hardware
from plait.plan.plan import Plan
from plait.ranks.collectives import barrier
from plait.verification.sweep import plans_on

MODELS = {
    "gpt2": {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "context": 128},
    "llama": {"layers": 6, "hidden": 192, "heads": 6, "vocab": 512, "context": 256},
}
ROWS, MICROBATCHES, WARM_UP = 8, 4, 1


Pairs = list[tuple[float, float]]
"""Seconds of a step of a plan, and of the calibration's step right after it."""


def model_of(name: str) -> torch.nn.Sequential:
    return getattr(plait.models, name)(**MODELS[name])  # type: ignore[no-any-return]


def step_of(name: str, plan: Plan, mesh: plait.Mesh) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds, from where all ranks are ready."""
    engine = plait.parallelize(model_of(name), plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-3)
    tokens = torch.zeros(ROWS // plan.dp, MODELS[name]["context"], dtype=torch.int64)

    def step() -> float:
        barrier(mesh.group("world")).wait()
        start = time.perf_counter()
        engine.forward_backward(tokens, tokens)
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def measured(name: str, plans: list[Plan], steps: int) -> list[Pairs | None]:
    """Return for each plan this rank's steps beside those of the calibration; None where it cannot run."""
    reference = model_step(LARGE, plait.Mesh(Plan(dp=plans[0].world)).group("world"))
    found: list[Pairs | None] = []
    for plan in plans:
        mesh = plait.Mesh(plan)
        try:
            step = step_of(name, plan, mesh)
            step()  # attention knows only here whether cp divides its heads
        except PlaitError:
            found.append(None)
        else:
            pairs = [(step(), seconds_of(reference)) for _ in range(steps + WARM_UP)]
            found.append(pairs[WARM_UP:])
        mesh.close()
    return found


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def beside_reference(of_ranks: Sequence[Pairs | None]) -> float | None:
    """Return the median of a plan's steps divided by those of the calibration, both of the slowest rank."""
    pairs = [one for one in of_ranks if one is not None]
    if len(pairs) < len(of_ranks):
        return None
    return median(
        max(step for step, _ in turn) / max(other for _, other in turn) for turn in zip(*pairs, strict=True)
    )


def predicted(name: str, plan: Plan, hardware: Path) -> float | None:
    try:
        return plait.predict(model_of(name), plan, hardware, rows=ROWS // plan.dp).step_seconds
    except PlaitError:
        return None


def memory_error(name: str, plan: Plan, hardware: Path) -> float:
    """Return how far the predicted memory of the largest rank is from that of `plait.memory`, as a part."""
    model, rows = model_of(name), ROWS // plan.dp
    return (
        plait.predict(model, plan, hardware, rows=rows).peak_memory
        / plait.memory(model, plan, rows=rows).most
        - 1
    )


def ranks_of(values: list[float]) -> list[float]:
    """Return the place of each value in their order; equal values share the middle of their places."""
    return [sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values]


def spearman(one: list[float], other: list[float]) -> float:
    a, b = ranks_of(one), ranks_of(other)
    middle = fmean(a)
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return top / sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))


def plans_for(ranks: int) -> list[Plan]:
    every = plans_on(ranks, Plan(microbatches=MICROBATCHES), ROWS, in_parts=True)
    return [plan for plan in every if plan.offload == "none"]


def program(plan: Plan) -> Plan:
    """Return one plan for all that run the same program: without a pipeline the schedule changes nothing."""
    return replace(plan, schedule="1f1b", chunks=None) if plan.pp == 1 else plan


def report(name: str, ranks: int, hardware: Path, steps: int, *, shown: bool) -> str:
    """Return the row of the table; `shown`: print what was measured and predicted of each plan."""
    plans, unit = plans_for(ranks), predicted_seconds(LARGE, load_hardware(hardware))
    every = plait.launch(measured, name, plans, steps, ranks=ranks, threads=1)
    times = [beside_reference(one) for one in zip(*every, strict=True)]
    rows = []
    for plan, ratio in zip(plans, times, strict=True):
        guess = predicted(name, plan, hardware)
        if ratio is not None and guess is not None:
            rows.append((ratio * unit, guess, plan))
    of_programs: dict[Plan, list[float]] = {}
    for seconds, _, plan in rows:
        of_programs.setdefault(program(plan), []).append(seconds)
    medians = {one: median(seconds) for one, seconds in of_programs.items()}
    real, guessed = [row[0] for row in rows], [row[1] for row in rows]
    errors = [guess / seconds - 1 for seconds, guess, _ in rows]
    first = min(rows, key=lambda row: row[1])[2]
    memory = [abs(memory_error(name, plan, hardware)) for _, _, plan in rows]
    cells = [
        name,
        f"{ranks}",
        f"{len(rows)}",
        f"{fmean(map(abs, errors)):.1%}",
        f"{fmean(errors):+.1%}",
        f"{max(map(abs, errors)):.1%}",
        f"{spearman(real, guessed):.3f}",
        f"{medians[program(first)] / min(medians.values()) - 1:.1%}",
        f"{fmean(memory):.1%}, {max(memory):.1%}",
    ]
    for seconds, guess, plan in sorted(rows, key=lambda row: row[0]) if shown else ():
        print(f"  {seconds * 1e3:8.1f} ms measured {guess * 1e3:8.1f} predicted  {plan}", flush=True)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--plans", action="store_true", help="print each plan")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        hardware = Path(tempfile.mkdtemp()) / "this.toml"
        calibrate(hardware, ranks)
        print(hardware.read_text(), flush=True)
        rows += [report(name, ranks, hardware, options.steps, shown=options.plans) for name in options.models]
    print("| model | ranks | plans | mean error | bias | largest | Spearman | first beside best | memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
