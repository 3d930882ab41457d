"""Does plait work on this machine's GPUs, and how fast is it? Prints one table, to send back; see README.md.

Runs the tests marked `gpu`; compares the memory of a step with what `plait.memory` predicts; and measures
tokens a second beside plain PyTorch, DDP and FSDP2 on the same model. Whatever fails or hangs becomes a row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import marked_tests
from configurations import configurations, ranks_of
from measuring import Measuring
from report import ROOT, Row, environment, write
from work import WORKS, build, fitting

from plait.ranks.accelerator import default_device, name_of, total_memory, visible_accelerators

PARTS = ("tests", "memory", "speed")
SHARED_PARTS = ("tests", "memory")
"""Where ranks share a GPU, and take turns."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report after each row, and print it at the end; 1 where a row is no result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = parsed(words)
    ranks, output = ranks_of(given.gpus * given.ranks_per_gpu), Path(given.output)
    measuring = measuring_of(given, output.parent / "logs")
    lines = [*environment(given.device, ranks, words), f"- Work: {described(measuring)}"]
    start, rows, text = time.monotonic(), list[Row](), ""
    try:
        for row in all_rows(given, ranks, measuring):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            took = f"- Took {(time.monotonic() - start) / 60:.1f} minutes"
            text = write(output, [*lines, took], rows)
    except KeyboardInterrupt:
        print("\nInterrupted: this is what there is so far.", file=sys.stderr)
    print(text, end="")
    print(f"It is in {output}, too; what the ranks printed is in {measuring.logs}.", file=sys.stderr)
    return int(any(row.plait in ("error", "failed", "no answer") for row in rows))


def all_rows(given: argparse.Namespace, ranks: int, measuring: Measuring) -> Iterator[Row]:
    """Yield the rows, one after the other."""
    parts = set(given.part or (PARTS if given.ranks_per_gpu == 1 else SHARED_PARTS))
    if "tests" in parts:
        shown = given.gpus if given.ranks_per_gpu > 1 else ranks
        yield from marked_tests.rows(given.device, shown, given.timeout, given.ranks_per_gpu)
    chosen = [one for one in configurations(ranks) if not given.only or one.name in given.only]
    yield from chain.from_iterable(measuring.rows(one, parts) for one in chosen)


def measuring_of(given: argparse.Namespace, logs: Path) -> Measuring:
    """Return the work that fits the GPU, and how often it is done."""
    gpu = default_device() if given.device == "cuda" else None
    size = given.model or ("tiny" if given.tiny or gpu is None else fitting(total_memory(gpu)))
    few = 1 if given.tiny else None
    return Measuring(
        work=WORKS[size],
        device=given.device,
        gpu="" if gpu is None else name_of(gpu),
        turns=given.turns or (2 * few if few else 7),
        steps=given.steps or few or 3,
        warm=few or 2,
        timeout=given.timeout,
        ranks_per_gpu=given.ranks_per_gpu,
        logs=logs,
    )


def described(measuring: Measuring) -> str:
    """Return a description of the work."""
    work = measuring.work
    size = sum(parameter.numel() for parameter in build(work).parameters())
    steps = "one step" if measuring.steps == 1 else f"{measuring.steps} steps"
    return (
        f"GPT-2 of {size / 1e6:,.1f} M parameters ({work.layers} blocks, hidden {work.hidden}, vocabulary "
        f"{work.vocab:,}, untied), bf16, fused AdamW; each GPU adds {work.microbatches} × {work.rows} "
        f"sequences of {work.context:,} tokens to a step; {measuring.turns} turns (A B A B …) of {steps} "
        f"each, after {measuring.warm} that do not count"
    )


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; the number of GPUs is by default that of the visible ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, help="use this many, 1 to 8 (default: all that are visible)")
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=1, help="more ranks than GPUs: no speed is measured"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--model", choices=WORKS, help="default: what fits the GPU twice")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all (may be repeated)")
    parser.add_argument("--only", action="append", metavar="NAME", help="of memory and speed: this row")
    parser.add_argument("--turns", type=int, help="that count (default 7)")
    parser.add_argument("--steps", type=int, help="of a turn (default 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a test, or for an answer")
    parser.add_argument("--output", default=str(ROOT / "runs" / "gpu" / "report.md"), help="of the report")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not visible_accelerators():
        parser.error("no GPU is visible to a torch with NCCL; --device cpu --tiny tries this script")
    given.gpus = given.gpus or (visible_accelerators() if given.device == "cuda" else 2)
    if given.gpus < 1 or (given.device == "cuda" and given.gpus > visible_accelerators()):
        parser.error(f"--gpus is {given.gpus}: give at least 1, and no more than are visible")
    if given.ranks_per_gpu < 1 or (given.ranks_per_gpu > 1 and given.device == "cpu"):
        parser.error(f"--ranks-per-gpu is {given.ranks_per_gpu}: give at least 1, and only with GPUs")
    if given.ranks_per_gpu > 1 and "speed" in (given.part or ()):
        parser.error(
            "ranks that share a GPU take turns, so their speed means nothing: leave --part speed out"
        )
    names = [one.name for one in configurations(ranks_of(given.gpus * given.ranks_per_gpu))]
    unknown = [name for name in given.only or () if name not in names]
    if unknown:
        parser.error(f"--only is {unknown[0]!r}: give one of {'; '.join(names)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
