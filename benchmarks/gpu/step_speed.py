"""How fast is a step on one GPU? plait beside plain PyTorch, FSDP2 and torchao, in turns; prints row by row.

    .venv/bin/python benchmarks/gpu/step_speed.py [--size large] [--only compiled] [--hardware this.toml]

Sizes of a GPT-2: `large`, where the GPU is busy, `small`, where it waits for the host, `wide`, for products
in float8. Each pair runs in one process and takes turns (A B A B …). The README has a table.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from statistics import median
from typing import Any

import torch
from peak import Peak
from peers import PEERS, compiled
from torch import Tensor
from work import WORKS, Trainee, Work, build, shares
from woven import plan_of, predicted, woven

import plait
from plait.app.loop.meter import flops_per_token
from plait.errors import ConfigError
from plait.estimate.time.hardware import gpu_peaks
from plait.ranks.accelerator import CPU, allocated, current_accelerator, is_accelerator, name_of, synchronize

SIZES = {
    "large": WORKS["1.3B"],
    "small": Work(12, 768, 12, vocab=32768, context=512, rows=1, microbatches=8),
    "wide": Work(4, 4096, 32, vocab=32768, context=2048, rows=4, microbatches=2),
    "tiny": WORKS["tiny"],
}
TURNS, STEPS = 5, 2
"""How often each takes its turn, the first time not counted, and the steps of a turn."""
READY = 4
"""Steps before the first turn: kernels are compiled, graphs recorded, and the optimizer has its state."""
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Pair:
    """A plan of plait, and the peer beside it."""

    name: str
    plan: dict[str, Any]
    peer: str
    compiles: bool = False


FLOAT8: dict[str, Any] = {"compile": True, "linears": "float8"}
MASTERS = {"master_precision": "fp32"}
PAIRS = (
    Pair("eager", {}, "plain PyTorch"),
    Pair("graphs", {"cuda_graphs": True}, "plain PyTorch"),
    Pair("loss_rows 1024", {"loss_rows": 1024}, "plain PyTorch"),
    Pair("recompute full", {"recompute": "full"}, "plain PyTorch"),
    Pair("masters fp32", MASTERS, "FSDP2, masters fp32"),
    Pair("graphs", {"cuda_graphs": True}, "plain PyTorch, reduce-overhead"),
    Pair("compiled, graphs", {"compile": True, "cuda_graphs": True}, "plain PyTorch, reduce-overhead"),
    Pair("compiled", {"compile": True}, "plain PyTorch, compiled"),
    Pair("compiled, loss_rows 1024", {"compile": True, "loss_rows": 1024}, "plain PyTorch, compiled"),
    Pair("float8", FLOAT8, "plait, compiled in bf16"),
    Pair("float8-rowwise-gw", {"compile": True, "linears": "float8-rowwise-gw"}, "plait, compiled in bf16"),
    Pair("float8", FLOAT8, "torchao, compiled"),
    Pair("float8, masters fp32", FLOAT8 | MASTERS, "plait, compiled in bf16, masters fp32"),
)


def compiled_in_bf16(work: Work, ranks: int, device: torch.device, **fields: Any) -> Trainee:
    """Return plait's own step in bf16, beside which linears in float8 stand; `fields`: more of its plan."""
    return woven(work, ranks, {"compile": True, **fields}, device, 120.0)[0]


MAKERS: dict[str, Callable[..., Trainee]] = {
    **PEERS,
    "plain PyTorch, compiled": compiled,
    "plain PyTorch, reduce-overhead": partial(compiled, mode="reduce-overhead"),
    "plait, compiled in bf16": compiled_in_bf16,
    "plait, compiled in bf16, masters fp32": partial(compiled_in_bf16, **MASTERS),
    "torchao, compiled": partial(compiled, float8="tensorwise"),
}


@dataclass
class Runner:
    """A contestant that is ready to run, and what was measured of it."""

    trainee: Trainee
    batches: Batches
    device: torch.device

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.host: list[float] = []
        self.loss = 0.0

    def turn(self) -> None:
        """Take `STEPS` steps; keep the seconds of one, and those that the host took to start it."""
        batches = list(islice(self.batches, STEPS))
        synchronize(self.device)
        start = time.perf_counter()
        for batch in batches:
            loss = self.trainee.step(*batch)
        self.host.append((time.perf_counter() - start) / STEPS)
        synchronize(self.device)
        self.seconds.append((time.perf_counter() - start) / STEPS)
        self.loss = float(loss)

    def peak(self) -> int:
        """Return the most bytes allocated in a step, less those of whatever else lives on the device."""
        peak = Peak(self.device)
        peak.include(self.trainee.state())
        with peak:
            self.trainee.step(*next(self.batches))
            synchronize(self.device)
        return peak.most

    def kernels(self) -> list[tuple[str, float]]:
        """Return what a step runs on a GPU: names and seconds; nothing on a CPU."""
        if not is_accelerator(self.device):
            return []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            self.trainee.step(*next(self.batches))
            synchronize(self.device)
        kind = torch.autograd.DeviceType.CUDA
        # Beside kernels there are the ranges that the program has named, such as plait's actions.
        events = [
            event
            for event in recorded.events() or ()
            if event.device_type == kind and not event.is_user_annotation
        ]
        return [(event.name, event.time_range.elapsed_us() / 1e6) for event in events]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the wanted pairs in one process, which prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, action="append", help="default: large and small")
    parser.add_argument("--only", action="append", metavar="NAME", choices={pair.name for pair in PAIRS})
    parser.add_argument("--beside", action="append", metavar="PEER", choices=MAKERS, help="only these peers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script")
    parser.add_argument("--hardware", help="a file of plait plan --calibrate, to predict with it too")
    parser.add_argument("--kernels", type=int, default=0, help="print so many that take longest, for each")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no further pair is begun")
    given = parser.parse_args(arguments)
    plait.launch(measure, given, ranks=1, device=given.device)


def measure(given: argparse.Namespace) -> None:
    """Print a table's rows, pair by pair; those with the same peer share it."""
    start = time.monotonic()
    device = current_accelerator() if given.device == "cuda" else CPU
    name = name_of(device) if is_accelerator(device) else "CPU"
    print(f"{name}, torch {torch.__version__}, plait {plait.__version__}", flush=True)
    print("| size | contestant | ms | ratio | host ms | kernels | busy ms | MFU | peak GB | predicted | "
          "predicted ms | loss |\n|" + "---|" * 12, flush=True)  # fmt: skip
    for size in given.size or ("large", "small"):
        wanted = [
            pair
            for pair in PAIRS
            if (not given.only or pair.name in given.only) and (not given.beside or pair.peer in given.beside)
        ]
        for peer, pairs in groupby(wanted, key=lambda pair: pair.peer):
            if time.monotonic() - start > given.seconds:
                print(f"(stopped before {size}, {peer})", flush=True)
                return
            for line in rows(size, peer, list(pairs), device, name, given):
                print(line, flush=True)
    print(f"took {time.monotonic() - start:.0f} s", flush=True)


def rows(
    size: str, peer: str, pairs: list[Pair], device: torch.device, gpu: str, given: argparse.Namespace
) -> Iterator[str]:
    """Yield a row for each plan, then one for the peer, as it was beside the first of them."""
    work = SIZES[size]
    before = allocated(device)
    theirs = ready(MAKERS[peer](work, 1, device), work, device)
    peak = theirs.peak() - before
    first: list[str] = []
    for pair in pairs:
        theirs.seconds, theirs.host = [], []
        before = allocated(device)
        try:
            ours = ready(woven(work, 1, pair.plan, device, 120.0)[0], work, device)
            held = ours.peak() - before
            for _ in range(TURNS):
                theirs.turn()
                ours.turn()
        except Exception as error:  # the other pairs are measured all the same
            reason = str(error).partition("\n")[0][:150]
            yield f"| {size} | plait, {pair.name} | {type(error).__name__}: {reason} |"
            continue
        ratio = median(a / b for a, b in zip(theirs.seconds[1:], ours.seconds[1:], strict=True))
        foreseen = prediction(work, pair, gpu, given.hardware)
        yield row(size, f"plait, {pair.name}", ours, work, gpu, ratio, held, foreseen, given.kernels)
        first = first or [row(size, peer, theirs, work, gpu, 1.0, peak, ("", ""), given.kernels)]
        del ours
        _free(device)
    yield from first
    del theirs
    _free(device)


def ready(trainee: Trainee, work: Work, device: torch.device) -> Runner:
    """Return a contestant that has taken `READY` steps."""
    runner = Runner(trainee, shares(work, 1, 0, 1), device)
    for batch in islice(runner.batches, READY):
        trainee.step(*batch)
    synchronize(device)
    return runner


def row(
    size: str,
    name: str,
    one: Runner,
    work: Work,
    gpu: str,
    ratio: float,
    peak: int,
    predictions: tuple[str, str],
    shown: int,
) -> str:
    """Return the row of a contestant; `ratio` is the peer's time over its own, `shown` how many kernels."""
    seconds = median(one.seconds[1:])
    operations = work.tokens * flops_per_token(
        build(work), layers=work.layers, hidden=work.hidden, context=work.context
    )
    rate = gpu_peaks(gpu).get("bf16")
    used = "" if rate is None else f"{operations / seconds / rate:.1%}"
    kernels = one.kernels()
    busy = sum(taken for _, taken in kernels)
    cells = (
        *(size, name, f"{seconds * 1e3:.1f}", f"{ratio:.3f}", f"{median(one.host[1:]) * 1e3:.1f}"),
        *(
            f"{len(kernels):,}",
            f"{busy * 1e3:.1f}",
            used,
            f"{peak / 1e9:.3f}",
            *predictions,
            f"{one.loss:.4f}",
        ),
    )
    return "\n".join([f"| {' | '.join(cells)} |", *longest(kernels, shown)])


def longest(kernels: list[tuple[str, float]], count: int) -> Iterator[str]:
    """Yield a line for each of the `count` kernels that take longest."""
    taken: dict[str, list[float]] = {}
    for name, seconds in kernels:
        taken.setdefault(name[:90], []).append(seconds)
    for name, each in sorted(taken.items(), key=lambda item: -sum(item[1]))[:count]:
        yield f"    {sum(each) * 1e3:9.2f} ms  {len(each):5} x  {name}"


def prediction(work: Work, pair: Pair, gpu: str, hardware: str | None) -> tuple[str, str]:
    """Return what `plait.memory` and `plait.predict` say of a plan: gigabytes, and milliseconds."""
    device = torch.device("cuda" if gpu != "CPU" else "cpu")
    memory = predicted(work, 1, pair.plan, device)[0]
    plan = plan_of(work, 1, pair.plan)
    known = "h200-sxm" if "H200" in gpu else "h100-sxm" if "H100" in gpu else "cpu-two-cores"
    times = []
    for machine in filter(None, (known, hardware)):
        try:
            found = plait.predict(build(work), plan, machine, rows=work.rows * work.microbatches)
        except ConfigError:  # a machine without a figure for the products' format
            continue
        times.append(f"{found.step_seconds * 1e3:.1f}")
    return f"{memory / 1e9:.3f}", ", ".join(times)


def _free(device: torch.device) -> None:
    gc.collect()
    if is_accelerator(device):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
