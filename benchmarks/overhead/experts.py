"""What does the host spend on a compiled layer with experts? Prints the table of README.md.

A Llama with 12 blocks of width 64, in which a token has 2 of 8 experts and a shared one; 4 micro-batches of
32 tokens, forward and backward, one rank, one thread. Counts do not vary; `--rounds` also measures the host's
time, with the rows in turns.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from operations import (
    BLOCKS,
    CONTEXT,
    HEADS,
    HIDDEN,
    MICROBATCHES,
    VOCAB,
    OperationCounter,
    batch,
    initialised,
)
from run import Step, python_calls

import plait

SIZES: dict[str, Any] = {
    **{"layers": BLOCKS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 2, "vocab": VOCAB, "context": CONTEXT},
    **{"experts": 8, "top_k": 2, "inner": 64, "shared": 64},
}
WAYS: dict[str, Any] = {"eager": False, "compiled, no generated code": "graphs", "compiled": True}
ROWS: dict[str, tuple[Any, str]] = {
    f"{name}{', recomputed' * (recompute == 'full')}": (compile, recompute)
    for recompute in ("none", "full")
    for name, compile in WAYS.items()
}


def step_of(compile: Any, recompute: str) -> Step:
    plan = plait.Plan(microbatches=MICROBATCHES, compile=compile, recompute=recompute)  # type: ignore[arg-type]
    model = initialised(plait.models.llama(**SIZES), torch.float32)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy, broadcast=True)
    return partial(engine.forward_backward, *batch())


def in_a_rank(rounds: int) -> None:
    torch.set_num_threads(1)
    per, times = BLOCKS * MICROBATCHES, dict[str, list[float]]()
    steps = {name: step_of(*row) for name, row in ROWS.items()}
    print("| | Python calls | operations |\n|---|---|---|")
    for name, step in steps.items():
        for _ in range(3):
            step()
        with OperationCounter() as counter:
            step()
        print(f"| {name} | {python_calls(step) / per:.0f} | {counter.operations.total() / per:.0f} |")
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times.setdefault(name, []).append((time.process_time() - start) / per * 1e6)
    for name, each in times.items():
        print(f"| {name} | {median(each):.0f} µs | {median(each) / median(times['eager']):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=0, help="measure the host's time in so many turns")
    plait.launch(in_a_rank, parser.parse_args().rounds, ranks=1, ranks_as="threads")


if __name__ == "__main__":
    main()
