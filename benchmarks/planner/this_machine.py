"""How well are the steps of this machine predicted? Calibrates it, then runs every plan of two ranks.

Prints the table of README.md, section "This machine". On a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import torch

import plait
from plait.calibration.calibrate import calibrate
from plait.errors import PlaitError
from plait.plan import Plan
from plait.verification.sweep import plans_on

MODELS = {
    "gpt2": {"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024, "context": 128},
    "llama": {"layers": 6, "hidden": 192, "heads": 6, "vocab": 512, "context": 256},
}
ROWS, MICROBATCHES = 8, 4


def model_of(name: str) -> torch.nn.Sequential:
    return getattr(plait.models, name)(**MODELS[name])  # type: ignore[no-any-return]


def measured(name: str, plans: list[Plan], steps: int) -> list[float | None]:
    """Return the median seconds of a step of each plan, on this rank; None where it cannot run."""
    found: list[float | None] = []
    for plan in plans:
        try:
            mesh = plait.Mesh(plan)
            engine = plait.parallelize(model_of(name), plan, mesh, loss=plait.cross_entropy)
        except PlaitError:
            found.append(None)
            continue
        optimizer = torch.optim.AdamW(engine.parameter_groups(weight_decay=0.1), lr=1e-3)
        rows, context = ROWS // plan.dp, MODELS[name]["context"]
        tokens = torch.zeros(rows, context, dtype=torch.int64)
        times = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            engine.forward_backward(tokens, tokens)
            engine.step(optimizer, 1.0)
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        found.append(median(times[2:]))
    return found


def predicted(name: str, plan: Plan, hardware: Path) -> float | None:
    try:
        return plait.predict(model_of(name), plan, hardware, rows=ROWS // plan.dp).step_seconds
    except PlaitError:
        return None


def ranks_of(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    for place, number in enumerate(order):
        places[number] = place
    return places


def spearman(one: list[float], other: list[float]) -> float:
    a, b = ranks_of(one), ranks_of(other)
    middle = fmean(a)
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return top / sum((x - middle) ** 2 for x in a)


def plans_for(ranks: int) -> list[Plan]:
    every = plans_on(ranks, Plan(microbatches=MICROBATCHES), ROWS, in_pieces=True)
    return [plan for plan in every if plan.offload == "none"]


def report(name: str, ranks: int, hardware: Path, steps: int, *, shown: bool) -> None:
    plans = plans_for(ranks)
    every = plait.launch(measured, name, plans, steps, ranks=ranks, threads=1)
    times = [max(one) if all(one) else None for one in zip(*every, strict=True)]
    rows = []
    for plan, seconds in zip(plans, times, strict=True):
        guess = predicted(name, plan, hardware)
        if seconds is not None and guess is not None:
            rows.append((seconds, guess, plan))
    real, guessed = [row[0] for row in rows], [row[1] for row in rows]
    errors = [guess / seconds - 1 for seconds, guess, _ in rows]
    best = min(rows, key=lambda row: row[1])
    cells = [
        name,
        f"{ranks}",
        f"{len(rows)}",
        f"{fmean(map(abs, errors)):.1%}",
        f"{fmean(errors):+.1%}",
        f"{max(map(abs, errors)):.1%}",
        f"{spearman(real, guessed):.3f}",
        f"{best[0] / min(real) - 1:.1%}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    for seconds, guess, plan in sorted(rows, key=lambda row: row[0]) if shown else ():
        print(f"  {seconds * 1e3:8.1f} ms measured {guess * 1e3:8.1f} predicted  {plan}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--plans", action="store_true", help="print each plan")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    hardware = Path(tempfile.mkdtemp()) / "this.toml"
    calibrate(hardware)
    print(hardware.read_text())
    print("| model | ranks | plans | mean error | bias | largest | Spearman | first beside best |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        for ranks in options.ranks:
            report(name, ranks, hardware, options.steps, shown=options.plans)


if __name__ == "__main__":
    main()
