"""How much faster are two ranks than one plain PyTorch process? Prints the table of README.md.

Each round runs the plain process and every plan one after the other (A B C A B C …), so that a change in
the machine's speed meets all of them; a ratio is taken inside its round, and the median over rounds counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = Path(__file__).with_name("plain.py")
PLANS = {
    "one rank": ["--train.microbatches", "8"],
    "pp = 2, 1f1b": ["--parallel.pp", "2", "--train.microbatches", "8"],
    "pp = 2, gpipe": ["--parallel.pp", "2", "--train.microbatches", "8", "--parallel.schedule", "gpipe"],
    "dp = 2": ["--parallel.dp", "2", "--train.microbatches", "4"],
}


def plain(steps: int, tied: bool) -> float:
    """Median seconds of a step in one plain process."""
    command = [sys.executable, str(PLAIN), "--steps", str(steps), *(["--tied"] if tied else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def woven(options: list[str], steps: int, tied: bool) -> float:
    """Median seconds of a step of `plait train`, as its metrics say."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "plait", "train", "--run.dir", folder, *options]
        settings = {
            "model.layers": 8,
            "model.hidden": 512,
            "model.heads": 8,
            "model.vocab": 8192,
            "model.context": 256,
            "model.tied": str(tied).lower(),
            "data.source": "random",
            "train.batch": 8,
            "train.steps": steps,
            "train.lr": 1e-4,
            "train.validate_batches": 1,
            "run.threads": 1,
            "run.device": "cpu",
            "run.compare": 0,
            "run.progress": "false",
        }
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[1:])


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tied", action="store_true", help="share the head's weight with the embedding")
    parser.add_argument("--only", choices=PLANS, action="append", help="run this plan (may be repeated)")
    arguments = parser.parse_args()
    plans = {name: PLANS[name] for name in arguments.only or PLANS}
    ratios: dict[str, list[float]] = {name: [] for name in plans}
    bases = []
    for _ in range(arguments.rounds):
        base = plain(arguments.steps, arguments.tied)
        bases.append(base)
        for name, options in plans.items():
            ratios[name].append(base / woven(options, arguments.steps, arguments.tied))
    tokens = 8 * 256
    print(f"plain process: {tokens / statistics.median(bases):.0f} tokens/s")
    print("| plan | × one plain process | each round |\n|---|---|---|")
    for name, values in ratios.items():
        rounds = ", ".join(f"{value:.2f}" for value in values)
        print(f"| {name} | {statistics.median(values):.2f} | {rounds} |")


if __name__ == "__main__":
    main()
