"""How long does a run take until its first replayed step after a rank was lost?

    .venv/bin/python benchmarks/survive/run.py [--rounds 6] [--limit 3]

Seconds from the signal until the last rank has the state of the last snapshot, in a new world, and until it
has computed the first step again. Every result is compared with the undisturbed run, bit by bit on as many
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from injected_run import Case, differences, steps_of, train
from injections import Injection, Injector, Kind

import plait

PLANS = ("both", "three", "full")
EVERY = 2


@dataclass(frozen=True)
class Row:
    """What happens, what takes the place of the lost rank, and how the ranks are started."""

    failure: str
    place: str
    start: Callable[[Path, Case, float], Sequence[Any]]
    kind: Kind = "kill"
    on_disk: bool = False
    failures: int = 0
    """Of one run; 0: as many as there are rounds."""
    plans: tuple[str, ...] = PLANS


def elastic(**settings: Any) -> Callable[[Path, Case, float], Sequence[Any]]:
    """Ranks under plait's supervisor."""

    def start(folder: Path, case: Case, limit: float) -> Sequence[Any]:
        own = plait.ranks.Elastic(**settings)
        return plait.launch(train, folder, case, ranks=4, threads=1, device="cpu", timeout=limit, elastic=own)

    return start


def torchrun(folder: Path, case: Case, limit: float) -> Sequence[Any]:
    """Ranks under torchrun."""
    (folder / "case.json").write_text(repr(case))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "99"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, __file__, "--rank", str(folder)], check=True, env=environment, capture_output=True
    )
    results: list[Any] = json.loads((folder / "results.json").read_text())
    return results


def run_rank(folder: Path) -> None:
    """Train in a rank that torchrun has started."""
    case = eval((folder / "case.json").read_text())
    results = plait.launch(train, folder, case, device="cpu")
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results))


ROWS = (
    Row("killed", "a spare", elastic(spares=1)),
    Row("killed", "a spare; replicas are moved", elastic(spares=1), plans=("replicas",)),
    Row("killed", "a new process", elastic()),
    Row("killed", "none: 4, 3, 2 ranks", elastic(replace=False), failures=2),
    Row("stopped", "a spare", elastic(spares=1), kind="stop"),
    Row("killed", "torchrun, memory", torchrun),
    Row("killed", "torchrun, disk", torchrun, on_disk=True),
)


def measure(row: Row, rounds: int, limit: float) -> Iterator[tuple[float, float]]:
    """Yield seconds of each failure until all ranks are ready, and until the first step is done again."""
    failures = row.failures or rounds
    for _ in range(rounds // failures):
        kills = tuple(Injection(row.kind, "norm", 3 + 5 * turn, turn % 2) for turn in range(failures))
        case = Case(row.plans, 5 * failures + 3, EVERY, kills, on_disk=row.on_disk)
        with tempfile.TemporaryDirectory(prefix="survive-") as whole, tempfile.TemporaryDirectory() as folder:
            expected = elastic()(Path(whole), Case(row.plans, case.steps, EVERY), limit)
            results = row.start(Path(folder), case, limit)
            undisturbed = dict(steps_of(Path(whole)))
            found = differences(case, Path(folder), results, undisturbed, expected)
            assert not found, found
            times = sorted(Injector(Path(folder), kills).happened_at().values())
            assert len(times) == failures, times
            for time, later in zip(times, [*times[1:], float("inf")], strict=True):
                yield tuple(_last_first(Path(folder), name, time, later) for name in ("ready", "steps"))


def _last_first(folder: Path, name: str, after: float, before: float) -> float:
    """Seconds after a time until the last rank wrote into such a file for the first time."""
    times = [
        [at for line in path.read_text().splitlines() if after < (at := json.loads(line)[-1]) < before]
        for path in folder.glob(f"{name}-*.jsonl")
    ]
    return max(min(own) for own in times if own) - after


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds after which a rank hangs")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank)
        return
    print("| a rank is | takes its place | ready, s (median, most) | first step again, s (median, most) |")
    print("|---|---|---|---|")
    for row in ROWS:
        found = [*measure(row, options.rounds, options.limit)]
        shown = [f"{statistics.median(one):.2f}, {max(one):.2f}" for one in zip(*found, strict=True)]
        print(f"| {row.failure} | {row.place} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
