"""How many frames lie between `forward_backward` and a matrix product? Prints the table of README.md."""

import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.engine import Engine

SOURCE = Path(plait.__file__).parent
PRODUCTS = ("mm", "addmm")
SMALL = {"layers": 16, "hidden": 16, "heads": 2, "vocab": 32, "context": 8}
"""So small that next to nothing but overhead is left."""
MICROBATCHES = 8
CASES = {"tp = 1": (1, "none"), "tp = 2": (2, "none"), "tp = 2, sequence parallel": (2, "keep")}


class Stacks(TorchDispatchMode):
    """Note the frames of plait at each matrix product, as file and function, from `forward_backward` on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[tuple[str, str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        if func.overloadpacket.__name__ in PRODUCTS:
            codes = [frame.f_code for frame, _ in traceback.walk_stack(None)]
            before = takewhile(lambda code: code.co_name != "forward_backward", codes)
            own = [code for code in before if code.co_filename.startswith(f"{SOURCE}/")]
            self.found.append([(code.co_filename[len(f"{SOURCE}/") :], code.co_name) for code in own[::-1]])
        return func(*args, **(kwargs or {}))


def step(tp: int, sequence_parallel: str) -> tuple[Engine, Tensor]:
    """Return an engine, after a first step, and its tokens."""
    plan = plait.Plan(tp=tp, microbatches=MICROBATCHES, sequence_parallel=sequence_parallel)
    engine = plait.parallelize(plait.models.gpt2(**SMALL), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    tokens = torch.arange(MICROBATCHES * SMALL["context"]).view(MICROBATCHES, -1) % SMALL["vocab"]
    engine.forward_backward(tokens, tokens)
    return engine, tokens


def longest_stack(tp: int, sequence_parallel: str) -> list[tuple[str, str]]:
    """Return the frames between `forward_backward` and the product farthest from it in a forward."""
    engine, tokens = step(tp, sequence_parallel)
    with Stacks() as stacks:
        engine.forward_backward(tokens, tokens)
    forward = [stack for stack in stacks.found if not any("backward" in name for _, name in stack)]
    return max(forward, key=len)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of plait's Python functions, and all, on this thread."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            calls["all"] += 1
            calls["plait"] += str(SOURCE) in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def overhead(steps: int) -> tuple[float, float, float]:
    """Return µs, calls of plait and all calls, each per layer and micro-batch, of one rank."""
    engine, tokens = step(1, "none")
    runs = MICROBATCHES * (2 * SMALL["layers"] + 2)
    with counted() as calls:
        engine.forward_backward(tokens, tokens)
    times = []
    for _ in range(steps):
        start = time.process_time()
        engine.forward_backward(tokens, tokens)
        times.append((time.process_time() - start) / runs * 1e6)
    return min(times), calls["plait"] / runs, calls["all"] / runs


def main() -> None:
    """Print the table, the frames at tp = 2, and the overhead of a layer."""
    torch.set_num_threads(1)
    print("| | frames | files | rooms |\n|---|---|---|---|")
    for name, (tp, sequence_parallel) in CASES.items():
        stack = plait.launch(longest_stack, tp, sequence_parallel, ranks=tp, ranks_as="threads")[0]
        files = {file for file, _ in stack}
        print(f"| {name} | {len(stack)} | {len(files)} | {len({file.split('/')[0] for file in files})} |")
        if name == "tp = 2":
            shown = [f"{file:48}{function}" for file, function in stack]
    print("", *shown, "", sep="\n")
    least, own, every = plait.launch(overhead, 20, ranks=1, ranks_as="threads")[0]
    print(f"per layer and micro-batch: {least:.0f} µs, {own:.1f} calls of plait, {every:.1f} calls in all")


if __name__ == "__main__":
    main()
