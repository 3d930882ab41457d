"""One long sequence on two ranks: how much faster than one plain process, than a plain ring? Prints a table.

Each round runs every contestant one after the other (A B C A B C …), so that a change in the machine's speed
meets all of them; a ratio is taken inside its round, and the median over rounds counts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import plait

PEERS = Path(__file__).with_name("peers.py")
PLANS = {
    "ring, keys kept": {"context_parallel": "ring", "sequence_parallel": "keep"},
    "ring, keys sent again": {"context_parallel": "ring"},
    "ring, contiguous": {
        "context_parallel": "ring",
        "sequence_parallel": "keep",
        "context_layout": "contiguous",
    },
    "ring, striped": {"context_parallel": "ring", "sequence_parallel": "keep", "context_layout": "striped"},
    "ulysses": {"context_parallel": "ulysses"},
}


def peer(ranks: int, steps: int, length: int) -> float:
    """Median seconds of a step of plain PyTorch."""
    command = [sys.executable, str(PEERS), "--steps", str(steps), "--length", str(length)]
    if ranks == 1:
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    common = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=common | {"RANK": str(rank)})
        for rank in range(ranks)
    ]
    first, *_ = [process.communicate()[0] for process in processes]
    return float(first)


def woven_step(plan: plait.Plan, steps: int, length: int) -> float:
    """Median seconds of a step on this rank."""
    model = plait.models.gpt2(layers=8, hidden=512, heads=8, vocab=8192, context=length, tied=False)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.AdamW(engine.parameter_groups(0.1), lr=1e-4, fused=True)
    generator, seconds = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = torch.randint(0, 8192, (1, length + 1), generator=generator)
        start = time.perf_counter()
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:].contiguous())
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def woven(options: dict[str, str], steps: int, length: int, ranks: int = 2) -> float:
    """Median seconds of a step of plait on two processes."""
    plan = plait.Plan(cp=ranks, **options)  # type: ignore[arg-type]
    return plait.launch(woven_step, plan, steps, length, ranks=ranks, threads=1)[0]


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--only", choices=PLANS, action="append", help="run this plan (may be repeated)")
    arguments = parser.parse_args()
    steps, length = arguments.steps, arguments.length
    plans = {name: PLANS[name] for name in arguments.only or PLANS}
    each: dict[str, list[float]] = {name: [] for name in ("plain process", "plain ring", *plans)}
    for _ in range(arguments.rounds):
        each["plain process"].append(peer(1, steps, length))
        each["plain ring"].append(peer(2, steps, length))
        for name, options in plans.items():
            each[name].append(woven(options, steps, length))
    print(f"plain process: {length / statistics.median(each['plain process']):.0f} tokens/s")
    print("| | × one plain process | each round | × the plain ring |\n|---|---|---|---|")
    for name in ("plain ring", *plans):
        alone = [base / own for base, own in zip(each["plain process"], each[name], strict=True)]
        ring = [base / own for base, own in zip(each["plain ring"], each[name], strict=True)]
        rounds = ", ".join(f"{ratio:.2f}" for ratio in alone)
        print(f"| {name} | {statistics.median(alone):.2f} | {rounds} | {statistics.median(ring):.2f} |")


if __name__ == "__main__":
    main()
