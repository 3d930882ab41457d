"""How fast does `plait data prepare` tokenize, in how much memory, and how soon does training begin?

.venv/bin/python benchmarks/data/run.py speed    # beside datasets.map, in turn (A B A B …)
.venv/bin/python benchmarks/data/run.py memory   # against the size of the corpus
.venv/bin/python benchmarks/data/run.py open     # training from a corpus of 10 million documents
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from generated import make_corpus, make_text, make_tokenizer

HERE = Path(__file__).parent
PREPARE = "`plait data prepare`, the whole command"
SAMPLED_EVERY = 0.1
"""Seconds between two looks at the memory of all processes."""


def prepare(text: Path, folder: Path, tokenizer: Path, processes: int) -> list[str]:
    options = ["--tokenizer", str(tokenizer), "--processes", str(processes)]
    return [sys.executable, "-m", "plait", "data", "prepare", str(text), str(folder), *options]


class Taken(NamedTuple):
    """The time that passed, and that of all processors, in seconds."""

    passed: float
    worked: float


def speed(work: Path, megabytes: int, turns: int, processes: int) -> None:
    text, tokenizer = _inputs(work, megabytes)
    rows: dict[str, list[Taken]] = {}
    for turn in range(turns):
        contestants = [_prepared, _mapped]
        for contestant in contestants if turn % 2 else reversed(contestants):
            for name, taken in contestant(work, text, tokenizer, processes).items():
                rows.setdefault(name, []).append(taken)
    own, size = rows[PREPARE], text.stat().st_size / 1e6
    print(f"\n{size:.0f} MB of JSON lines, {processes} processes, {turns} turns\n")
    print("| | MB/s | time | time of all processors |\n|---|---|---|---|")
    for name, takens in rows.items():
        passed = statistics.median(one.passed / other.passed for one, other in zip(takens, own, strict=True))
        worked = statistics.median(one.worked / other.worked for one, other in zip(takens, own, strict=True))
        speed = size / statistics.median(one.passed for one in takens)
        print(f"| {name} | {speed:.1f} | {passed:.2f} | {worked:.2f} |")


def _prepared(work: Path, text: Path, tokenizer: Path, processes: int) -> dict[str, Taken]:
    taken, _ = _run(prepare(text, work / "out", tokenizer, processes))
    shutil.rmtree(work / "out")
    return {PREPARE: taken}


def _mapped(work: Path, text: Path, tokenizer: Path, processes: int) -> dict[str, Taken]:
    command = [sys.executable, str(HERE / "mapped.py"), str(text), str(tokenizer), str(processes)]
    whole, found = _run([*command, str(work / "cache")])
    passed, worked = (float(one) for one in found.split())
    shutil.rmtree(work / "cache")
    return {
        "`load_dataset` and `map`, the whole script": whole,
        "`map` alone, in a process that has loaded all": Taken(passed, worked),
    }


def _run(command: list[str]) -> tuple[Taken, str]:
    """Run a command; return what it took, and what it printed."""
    begin, worked = time.perf_counter(), sum(os.times()[2:4])
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Taken(time.perf_counter() - begin, sum(os.times()[2:4]) - worked), found


def memory(work: Path, sizes: Sequence[int], processes: int) -> None:
    print(
        f"\n{processes} processes\n\n"
        "| MB of JSON lines | seconds | MB/s | peak MB, all processes | command alone |"
    )
    print("|---|---|---|---|---|")
    for megabytes in sizes:
        text, tokenizer = _inputs(work, megabytes)
        size, begin = text.stat().st_size / 1e6, time.perf_counter()
        process = subprocess.Popen(
            prepare(text, work / "out", tokenizer, processes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        whole, alone = _watched(process)
        assert process.returncode == 0
        seconds = time.perf_counter() - begin
        print(
            f"| {size:,.0f} | {seconds:.0f} | {size / seconds:.1f} | {whole:.0f} | {alone:.0f} |", flush=True
        )
        shutil.rmtree(work / "out")
        text.unlink()


def _watched(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Wait for a process; return the peaks of resident MB, of it with its children, and of it alone."""
    whole = alone = 0.0
    while process.poll() is None:
        found = {pid: (parent, size) for pid, parent, size in _processes()}
        family = {process.pid}
        for pid in sorted(found):  # a child's number may be below its parent's only after a wrap-around
            if found[pid][0] in family:
                family.add(pid)
        whole = max(whole, sum(found[pid][1] for pid in family if pid in found))
        alone = max(alone, found.get(process.pid, (0, 0.0))[1])
        time.sleep(SAMPLED_EVERY)
    return whole, alone


def _processes() -> list[tuple[int, int, float]]:
    """Return number, parent and resident MB of all processes."""
    rows = []
    for one in Path("/proc").iterdir():
        try:
            if one.name.isdecimal():
                parent = int((one / "stat").read_text().rpartition(")")[2].split()[1])
                pages = int((one / "statm").read_text().split()[1])
                rows.append((int(one.name), parent, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
        except OSError:  # it has ended
            continue
    return rows


def opening(work: Path, documents: int) -> None:
    print(
        "\n| | open, ms | first batch, ms | hundredth batch, ms | resident MB more |\n|---|---|---|---|---|"
    )
    for chats in (False, True):
        make_corpus(work / "corpus", documents, chats=chats)
        name = "conversations, in rows" if chats else "documents, in windows"
        command = [sys.executable, str(HERE / "opening.py"), str(work / "corpus")]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(f"| {documents:,} {name} | {' | '.join(found.split())} |", flush=True)
        shutil.rmtree(work / "corpus")


def _inputs(work: Path, megabytes: int) -> tuple[Path, Path]:
    text, tokenizer = work / "text.jsonl", work / "tokenizer.json"
    make_text(text, megabytes)
    if not tokenizer.is_file():
        make_tokenizer(tokenizer, text)
    return text, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["speed", "memory", "open"])
    parser.add_argument("--megabytes", type=int, nargs="+", help="speed: 60; memory: 100 300 1000")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--documents", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "speed":
            speed(Path(folder), (options.megabytes or [60])[0], options.turns, options.processes)
        elif options.part == "memory":
            memory(Path(folder), options.megabytes or [100, 300, 1000], options.processes)
        else:
            opening(Path(folder), options.documents)


if __name__ == "__main__":
    main()
