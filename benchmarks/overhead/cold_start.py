"""How long does the first step of a compiled GPT-2 take, with torch's cache empty and full? Prints a table.

12 layers of width 768, one micro-batch of 128 tokens, one thread a rank. Each row is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

import torch

import plait

CONTEXT, VOCAB = 128, 50257
SIZES = {"layers": 12, "hidden": 768, "heads": 12, "vocab": VOCAB, "context": CONTEXT}
WITH: dict[str, Any] = {"eager": False, "graphs": "graphs", "compiled": True}
ROWS = (
    ("eager", "eager", 1, ""),
    ('`compile="graphs"`', "graphs", 1, ""),
    ("`compile=True`, empty cache", "compiled", 1, "one"),
    ("`compile=True`, again", "compiled", 1, "one"),
    ("`compile=True`, empty cache, two ranks", "compiled", 2, "two"),
)
"""Name, kind, ranks, and the cache that a row uses; rows with the same one share it."""


def processor_seconds(who: int) -> float:
    used = getrusage(who)
    return used.ru_utime + used.ru_stime


def first_steps(kind: str) -> list[float]:
    """Return the seconds of the first and second step, processor time of this rank and its compilers, and
    hits and misses of torch's cache."""
    from torch._dynamo.utils import counters

    plan = plait.Plan(dp=int(os.environ["RANKS"]), microbatches=1, compile=WITH[kind])
    engine = plait.parallelize(plait.models.gpt2(**SIZES), plan, plait.Mesh(plan), plait.cross_entropy)
    tokens = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
    seconds = []
    own, compilers = processor_seconds(RUSAGE_SELF), processor_seconds(RUSAGE_CHILDREN)
    for _ in range(2):
        start = time.perf_counter()
        engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            own = processor_seconds(RUSAGE_SELF) - own
            compilers = processor_seconds(RUSAGE_CHILDREN) - compilers
    found = counters["inductor"]
    return [*seconds, own, compilers, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]


def run_row(name: str, kind: str, ranks: int, folder: Path) -> None:
    """Print a row, from a new process in which torch's caches and compiled headers are in `folder`."""
    folder.mkdir(exist_ok=True)
    compiler, runs = folder / "g++", folder / "runs"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.[ch]*) echo >> {runs};; esac\nexec {which("g++")} "$@"\n')
    compiler.chmod(0o755)
    runs.write_text("")
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "RANKS": str(ranks),
    }
    command = [sys.executable, __file__, "--in-this-process", kind]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [list(map(float, line.split()[1:])) for line in printed.splitlines() if line.startswith("rank")]
    *seconds, hits, misses = (
        " / ".join(f"{one:.3g}" for one in column) for column in zip(*rows, strict=True)
    )
    print("|", " | ".join([name, *seconds, str(len(runs.read_text())), hits, misses]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a row's name")
    parser.add_argument(
        "--in-this-process", choices=WITH, help="run these first steps; for this script alone"
    )
    options = parser.parse_args()
    if options.in_this_process:
        ranks = int(os.environ["RANKS"])
        for row in plait.launch(first_steps, options.in_this_process, ranks=ranks, threads=1):
            print("rank", *row)
        return
    print(
        "| | first step, s | second | own processor s | compilers' processor s | g++ runs | hits | misses |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    with TemporaryDirectory() as folder:
        for name, kind, ranks, cache in ROWS:
            if options.only in name:
                run_row(name, kind, ranks, Path(folder, cache or kind))


if __name__ == "__main__":
    main()
