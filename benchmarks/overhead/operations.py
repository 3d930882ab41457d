"""How many operations does a training step run, over how many bytes? Prints the tables of README.md.

GPT-2 and Llama with 12 blocks, 4 micro-batches, gradient clipping and fused AdamW, one rank, one thread.
Counts do not vary; `--rounds` also measures the host's time, with the rows in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from run import Step, python_calls
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plait
from plait.models import gpt2, llama

BLOCKS, HIDDEN, HEADS, VOCAB, CONTEXT, MICROBATCHES, ROWS = 12, 64, 4, 256, 32, 4, 1
MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "GPT-2": partial(gpt2, layers=BLOCKS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, context=CONTEXT),
    "Llama": partial(
        llama, layers=BLOCKS, hidden=HIDDEN, heads=HEADS, kv_heads=2, vocab=VOCAB, context=CONTEXT
    ),
}
NO_WORK = (
    "c10d::",
    *("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_", "aten::_unsafe_view"),
    *("aten::unsafe_split", "aten::promote_types", "profiler::"),
)
"""Beginnings of the names of operations that compute nothing, besides those that return views."""


class OperationCounter(TorchDispatchMode):
    """Counts the operations that compute, and the bytes of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        returns = operation._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        name = operation._schema.name
        if not is_view and not name.startswith(NO_WORK):
            self.operations[name] += 1
            tensors = {id(one): one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)}
            self.bytes[name] += sum(one.numel() * one.element_size() for one in tensors.values())
        return result


def initialised(model: nn.Sequential, dtype: torch.dtype) -> nn.Sequential:
    """Return the model with values on the CPU."""
    torch.manual_seed(0)
    model = model.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        VOCAB, (MICROBATCHES * ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain(make: Callable[[], nn.Sequential], dtype: torch.dtype, *, compiled: bool = False) -> Step:
    model = initialised(make(), dtype)
    if compiled:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = batch()

    def step() -> None:
        for rows, wanted in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            logits = model(rows)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()) / MICROBATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_plait(make: Callable[[], nn.Sequential], **options: Any) -> Step:
    plan = plait.Plan(microbatches=MICROBATCHES, **options)
    model = initialised(make(), torch.float32)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy, broadcast=True)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-4, fused=True)
    inputs, targets = batch()

    def step() -> None:
        engine.forward_backward(inputs, targets)
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()

    return step


MASTERS: dict[str, Any] = {"precision": "bf16", "master_precision": "fp32"}
ROWS_OF_TABLE: dict[str, Callable[[Callable[[], nn.Sequential]], Step]] = {
    "plain, fp32": lambda make: plain(make, torch.float32),
    "plait, fp32": lambda make: with_plait(make),
    "plain, bf16": lambda make: plain(make, torch.bfloat16),
    "plait, bf16, fp32 masters": lambda make: with_plait(make, **MASTERS),
}
SHARDED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, reduced each micro-batch": {"reduce": "each"},
    "bf16, fp32 masters": MASTERS,
    "bf16, fp32 masters, reduced each micro-batch": {"reduce": "each", **MASTERS},
}
"""Plans in which two ranks shard all parameters."""
TIMED_ONLY: dict[str, Callable[[Callable[[], nn.Sequential]], Step]] = {
    "plain, fp32, compiled": lambda make: plain(make, torch.float32, compiled=True),
    "plait, fp32, compiled": lambda make: with_plait(make, compile=True),
}


def count(model: str, *, details: bool) -> None:
    """Print the operations, bytes and Python calls of each row."""
    per = BLOCKS * MICROBATCHES
    for name, make in ROWS_OF_TABLE.items():
        step = make(MODELS[model])
        for _ in range(3):
            step()
        with OperationCounter() as counter:
            step()
        megabytes = sum(counter.bytes.values()) / 1e6
        calls = python_calls(step) / per
        print(f"| {model} | {name} | {sum(counter.operations.values())} | {megabytes:.1f} | {calls:.0f} |")
        if details:
            for kind, number in counter.operations.most_common():
                print(f"    {number:6d} {counter.bytes[kind] / 1e6:9.2f} MB  {kind}")


def of_a_rank(model: str, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return this rank's operations in its fourth step, and their bytes, without what collectives move."""
    step = with_plait(MODELS[model], **options)
    for _ in range(3):
        step()
    with OperationCounter() as counter:
        step()
    return counter.operations, counter.bytes


def count_sharded(model: str) -> None:
    """Print rank 0's operations and bytes where two ranks shard all parameters."""
    for name, options in SHARDED.items():
        plan = {"dp": 2, "strategy": "full", **options}
        names, sizes = plait.launch(of_a_rank, model, plan, ranks=2, ranks_as="threads")[0]
        copies, filled = sizes["aten::copy_"], sizes["aten::_foreach_zero_"]
        print(
            f"| {model} | {name} | {names.total()} | {sizes.total() / 1e6:.1f} | {names['aten::copy_']} | "
            f"{copies / 1e6:.1f} | {names['aten::_foreach_zero_']} | {filled / 1e6:.1f} |"
        )


def measure(model: str, rounds: int) -> None:
    """Print the processor time of each row for a block and micro-batch, with the rows in turns."""
    steps = {name: make(MODELS[model]) for name, make in (ROWS_OF_TABLE | TIMED_ONLY).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append((time.process_time() - start) / (BLOCKS * MICROBATCHES) * 1e6)
    for name in steps:
        base = times["plain, bf16" if "bf16" in name else "plain, fp32"]
        print(f"| {model} | {name} | {median(times[name]):.0f} | {median(times[name]) / median(base):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=0, help="measure the host's time in so many turns")
    parser.add_argument("--details", action="store_true", help="list the operations by name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29545")
    dist.init_process_group("gloo", rank=0, world_size=1)
    print("| model | | operations | MB | Python calls |\n|---|---|---|---|---|")
    for model in MODELS:
        count(model, details=options.details)
    if options.rounds:
        print("\n| model | | µs | × plain |\n|---|---|---|---|")
        for model in MODELS:
            measure(model, options.rounds)
    dist.destroy_process_group()
    print("\n| model | | operations | MB | copies | MB | fills | MB |\n|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        count_sharded(model)


if __name__ == "__main__":
    main()
