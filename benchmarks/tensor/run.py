"""What do two tensor-parallel ranks give, and against PyTorch's own? Prints the table of README.md.

Each round runs the plain process, PyTorch's tensor parallelism and plait's, one after the other
(A B C A B C …), so that a change in the machine's speed meets all of them; ratios are taken inside a round,
and the median over rounds counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = Path(__file__).parents[1] / "two_ranks" / "plain.py"
TORCH_TP = Path(__file__).with_name("torch_tp.py")
PEERS = {
    "plain process": [str(PLAIN)],
    "torch, tp = 2": [str(TORCH_TP)],
    "torch, tp = 2, as documented": [str(TORCH_TP), "--documented"],
    "torch, tp = 2, three linears": [str(TORCH_TP), "--separate"],
}
WOVEN = {
    "plait, tp = 2": ["--parallel.overlap", "true"],
    "plait, tp = 2, no overlap": ["--parallel.overlap", "false"],
}
DEFAULT = [name for name in (*PEERS, *WOVEN) if name != "torch, tp = 2, three linears"]
BASES = ("plain process", "torch, tp = 2", "torch, tp = 2, as documented")


def peer(command: list[str], steps: int) -> float:
    """Median seconds of a step, as the script prints it."""
    whole = [sys.executable, *command, "--steps", str(steps)]
    return float(subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True).stdout)


def woven(options: list[str], steps: int) -> float:
    """Median seconds of a step of `plait train`, as its metrics say."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "plait", "train", "--run.dir", folder, *options]
        settings = {
            "parallel.tp": 2,
            "model.layers": 8,
            "model.hidden": 512,
            "model.heads": 8,
            "model.vocab": 8192,
            "model.context": 256,
            "model.tied": "false",
            "data.source": "random",
            "train.batch": 8,
            "train.microbatches": 8,
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
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[1:])


def table(seconds: dict[str, list[float]]) -> str:
    """Speed as a multiple of each base that was run: the median over rounds, and each round."""
    bases = [name for name in BASES if name in seconds]
    heads = [f"× {base} | each round" for base in bases]
    lines = [f"| {' | '.join(['', *heads])} |", "|---" * (1 + 2 * len(bases)) + "|"]
    for name, times in seconds.items():
        cells = [name]
        for base in bases:
            ratios = [one / other for one, other in zip(seconds[base], times, strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", ", ".join(f"{ratio:.2f}" for ratio in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--only", choices=[*PEERS, *WOVEN], action="append", help="run this (may be repeated)"
    )
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in arguments.only or DEFAULT}
    for _ in range(arguments.rounds):
        for name, times in seconds.items():
            if name in PEERS:
                times.append(peer(PEERS[name], arguments.steps))
            else:
                times.append(woven(WOVEN[name], arguments.steps))
    tokens = 8 * 256
    for name, times in seconds.items():
        print(f"{name}: {tokens / statistics.median(times):.0f} tokens/s")
    if any(base in seconds for base in BASES):
        print(table(seconds))


if __name__ == "__main__":
    main()
