"""What does the loss in chunks of rows cost, and what memory does it save? Prints the table of README.md.

The last stage of a pipeline (a linear, a norm and the output linear) runs forward and backward on one rank
with one thread, with whole logits and in chunks in turn (A B A B …); ratios of processor time are taken
inside a turn, and the median over turns counts. Bytes are those of `plait.memory`, which
`tests/parity/test_memory.py` compares with those that a step allocates.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn

import plait
from plait.engine import Engine

WHOLE = "whole"


def build(hidden: int, vocab: int) -> nn.Sequential:
    """The last stage, on the meta device."""
    with torch.device("meta"):
        linear, head = nn.Linear(hidden, hidden), nn.Linear(hidden, vocab, bias=False)
        return nn.Sequential(linear, nn.LayerNorm(hidden), head)


def step(engine: Engine, inputs: Tensor, targets: Tensor) -> float:
    """Processor seconds of a forward and backward."""
    for parameter in engine.parameters():
        parameter.grad = None
    start = time.process_time()
    engine.forward_backward(inputs, targets)
    return time.process_time() - start


def mebibytes(model: nn.Module, plan: plait.Plan, inputs: Tensor, targets: Tensor) -> tuple[int, int]:
    """The most that is alive in a step, and what of it stays between steps: parameters."""
    (rank,) = plait.memory(model, plan, inputs, targets, moments=0).ranks
    return rank.most >> 20, rank.at_rest >> 20


def rows_of_table(vocab: int, options: argparse.Namespace) -> list[str]:
    """The rows of the table for one vocabulary."""
    plans = {WHOLE: plait.Plan()} | {str(rows): plait.Plan(loss_rows=rows) for rows in options.chunks}
    inputs = torch.randn(options.rows, options.hidden)
    targets = torch.randint(vocab, (options.rows,))
    model = build(options.hidden, vocab)
    engines = {
        name: plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
        for name, plan in plans.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(options.rounds + 1):
        for name, engine in engines.items():
            spent = step(engine, inputs, targets)
            if turn:  # the first one touches the memory
                seconds[name].append(spent)
    table = []
    for name, plan in plans.items():
        most, resident = mebibytes(model, plan, inputs, targets)
        whole, _ = mebibytes(model, plans[WHOLE], inputs, targets)
        pairs = zip(seconds[name], seconds[WHOLE], strict=True)
        each = [own / other for own, other in pairs]
        shown = ", ".join(f"{one:.3f}" for one in each)
        table.append(
            f"| {vocab:,} | {name} | {most:,} | {most / whole:.2f} | {resident:,} "
            f"| {median(seconds[name]):.1f} | {median(each):.3f} | {shown} |"
        )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 131072])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| vocabulary | rows | MiB | × whole | of which parameters | s | × whole | each turn |")
    print("|---|---|---|---|---|---|---|---|")
    for vocab in options.vocab:
        print("\n".join(rows_of_table(vocab, options)), flush=True)


if __name__ == "__main__":
    main()
