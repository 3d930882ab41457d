"""Seconds and memory of a search for plans, by the number of ranks. Each runs in a process of its own.

    .venv/bin/python benchmarks/planner/search.py [--traced] [RANKS ...]

With `--traced` of models whose layers run on the meta device, as those of folders do.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from multiprocessing import get_context
from resource import RUSAGE_SELF, getrusage
from time import process_time

from plait.estimate.search.plan_search import search
from plait.estimate.time.hardware import load_hardware
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

LLAMA_7B = Decoder(
    layers=32, hidden=4096, heads=32, inner=11008, vocab=32000, context=4096, gated=True, rotary=True
)
LLAMA_405B = Decoder(
    layers=126,
    hidden=16384,
    heads=128,
    kv_heads=8,
    inner=53248,
    vocab=128256,
    context=8192,
    gated=True,
    rotary=True,
)
CASES = {
    8: ("7 B", LLAMA_7B, 64),
    64: ("7 B", LLAMA_7B, 256),
    512: ("405 B", LLAMA_405B, 512),
    4096: ("405 B", LLAMA_405B, 1024),
    16384: ("405 B", LLAMA_405B, 2048),
}
"""By ranks: the model, and the sequences of a step."""
LLAMA_8B = replace(LLAMA_405B, layers=32, hidden=4096, heads=32, inner=14336)
TRACED = {
    8: ("8 B, traced", LLAMA_8B, 64),
    64: ("8 B, traced", LLAMA_8B, 256),
    1024: ("8 B, traced", LLAMA_8B, 1024),
}
"""Likewise, for `--traced`."""
HEAD = (
    "ranks",
    "model",
    "batch",
    "CPU time",
    "memory",
    "plans",
    "predicted",
    "too large",
    "fastest",
    "it is",
)


def row(ranks: int, traced: bool) -> tuple[str, ...]:
    """Return the figures of the search for a number of ranks; `traced`: of a model whose layers run."""
    name, sizes, batch = (TRACED if traced else CASES)[ranks]
    model: object = sizes
    if traced:
        import torch

        from plait.estimate.prediction.traced_model import traced_model

        torch.set_num_threads(1)
        model = traced_model(sizes)
    before = process_time()
    base = Plan(precision="bf16", master_precision="fp32")
    found = search(model, load_hardware("h100-sxm"), ranks, batch, base=base)
    first, plan = found.best[0], found.best[0].plan
    return (
        f"{ranks:,}",
        name,
        f"{batch:,}",
        f"{process_time() - before:.1f} s",
        f"{getrusage(RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB",
        f"{found.plans:,}",
        f"{found.predicted:,}",
        f"{found.too_large:,}",
        f"{first.step_seconds:.3f} s",
        f"pp {plan.pp}, tp {plan.tp}, cp {plan.cp}, dp {plan.dp}, {plan.strategy}, {plan.schedule}",
    )


def main() -> None:
    """Print the table for the numbers of ranks that are given, or for all."""
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    given = sys.argv[1:]
    traced = "--traced" in given
    for ranks in map(int, [one for one in given if one != "--traced"] or (TRACED if traced else CASES)):
        with get_context("spawn").Pool(1) as pool:
            print("| " + " | ".join(pool.apply(row, (ranks, traced))) + " |", flush=True)


if __name__ == "__main__":
    main()
