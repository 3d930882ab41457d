"""How far is training in float8 from training in bf16 and fp32? Prints the first table of README.md.

Trains the demo's model on the demo's data with each recipe, in bf16 and in fp32; and in bf16 with another
seed, whose distance shows what chance does.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "examples" / "demo.toml"
ONE_RANK = {
    "parallel.pp": 1,
    "parallel.tp": 1,
    "run.compare": 0,
    "train.sample": "",
    "train.validate_batches": 32,
}
BF16 = {"train.precision": "bf16"}
RUNS = {
    "bf16": BF16,
    **{name: BF16 | {"parallel.linears": name} for name in ("float8", "float8-rowwise", "float8-rowwise-gw")},
    "fp32": {},
    "bf16, another seed": BF16 | {"train.seed": 1},
}
WINDOW = 20
"""Steps, of whose losses the table has the mean."""


def trained(options: dict[str, object], steps: int, batch: int) -> tuple[list[float], float]:
    """Return the loss of each step of a run, and its last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        given = ONE_RANK | options | {"run.dir": f"{folder}/run", "train.steps": steps}
        given |= {"train.validate_every": steps, "train.batch": batch, "train.microbatches": batch // 4}
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "plait", "train", "--config", str(CONFIG), *flags]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    validations = [row["validation_loss"] for row in rows if "validation_loss" in row]
    return losses, validations[-1]


def main() -> None:
    """Train each run and print its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, in micro-batches of 4")
    arguments = parser.parse_args()
    steps = arguments.steps
    ends = [steps * part // 3 for part in (1, 2, 3)]
    columns = ["run", *(f"loss to step {end}" for end in ends), "validation", "validation − that of bf16"]
    print(f"| {' | '.join(columns)} |\n|---|{'---|' * (len(columns) - 1)}")
    bf16 = 0.0
    for name, options in RUNS.items():
        losses, validation = trained(options, steps, arguments.batch)
        bf16 = bf16 or validation
        means = [statistics.mean(losses[max(0, end - WINDOW) : end]) for end in ends]
        numbers = " | ".join(f"{one:.4f}" for one in [*means, validation])
        print(f"| {name} | {numbers} | {validation - bf16:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
