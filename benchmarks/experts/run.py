"""What do experts on ranks of their own give, and against transformers' own? Prints the table of README.md.

Each round runs every way once, one after the other (A B C A B C …), so that a change in the machine's speed
meets all of them; ratios are taken inside a round, and the median over rounds counts.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = {
    "transformers, one process": ["transformers_ep.py", "--ranks", "1"],
    "transformers, fsdp 2 × ep 2": ["transformers_ep.py", "--ranks", "2", "--ep", "2"],
    "plait, one rank": ["plait_ep.py"],
    "plait, dp 2 × ep 2": ["plait_ep.py", "--dp", "2", "--ep", "2"],
    "plait, dp 2 × ep 2, loss_rows 128": ["plait_ep.py", "--dp", "2", "--ep", "2", "--loss_rows", "128"],
    "plait, dp 2 × ep 2, forced routing": ["plait_ep.py", "--dp", "2", "--ep", "2", "--forced_routing"],
    "plait, dp 2 × ep 2, full": ["plait_ep.py", "--dp", "2", "--ep", "2", "--strategy", "full"],
    "plait, dp 2, ep 1": ["plait_ep.py", "--dp", "2"],
    "plait, dp 2, dense": ["plait_ep.py", "--dp", "2", "--dense"],
    "plait, tp 2 × ep 2": ["plait_ep.py", "--tp", "2", "--ep", "2"],
    "transformers, fsdp 4 × ep 4": ["transformers_ep.py", "--ranks", "4", "--ep", "4"],
    "plait, dp 4 × ep 4": ["plait_ep.py", "--dp", "4", "--ep", "4"],
    "plait, dp 4 × ep 2": ["plait_ep.py", "--dp", "4", "--ep", "2"],
}
BASE = "transformers, fsdp 2 × ep 2"


def seconds(command: list[str], steps: int) -> float:
    """Median seconds of a step, as the script prints it."""
    script, *options = command
    whole = [sys.executable, str(HERE / script), *options, "--steps", str(steps)]
    found = subprocess.run(whole, check=True, capture_output=True, text=True)
    return float(found.stdout.split()[-2])


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=RUNS, action="append", help="run this one (may be repeated)")
    parser.add_argument("--base", choices=RUNS, default=BASE, help="the run that the others are divided by")
    arguments = parser.parse_args()
    base = arguments.base
    runs = {name: RUNS[name] for name in RUNS if name in (arguments.only or RUNS) or name == base}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, command in runs.items():
            times[name].append(seconds(command, arguments.steps))
    print(f"| | seconds a step | × {base} | each round |\n|---|---|---|---|")
    for name, each in times.items():
        ratios = [one / of_base for one, of_base in zip(each, times[base], strict=True)]
        rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {statistics.median(each):.2f} | {statistics.median(ratios):.2f} | {rounds} |")


if __name__ == "__main__":
    main()
