"""How many random mutants of plait does the quick suite notice, by package, and which live?

make mutants SEED=26 COUNT=60
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from known_tests import KEPT, ROOT, KnownTests, mirrored, run_with_coverage
from mutants import Mutant, draw_mutants


class Worker:
    """A process that runs tests in a copy of the working tree of its own."""

    def __init__(self, copy: Path, number: int) -> None:
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in names.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        (copy / "build").mkdir(exist_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(copy), str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, mutant: Mutant | None, tests: list[str], seconds: float) -> list[str]:
        """Return `["lived"]`, or the test that noticed the mutant (if any is given), and why."""
        assert self._process.stdin
        assert self._process.stdout
        files = {test.partition("::")[0] for test in tests}
        whole = sorted(files & {mirrored(mutant.path)}) if mutant else []
        call = {"path": mutant and mutant.path, "source": mutant and mutant.source}
        self._process.stdin.write(
            json.dumps({**call, "tests": tests, "whole_files": whole, "seconds": seconds}) + "\n"
        )
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def try_mutant(workers: Queue[Worker], known: KnownTests, mutant: Mutant) -> list[str]:
    """Return how the tests noticed a mutant, or `["lived"]`."""
    worker = workers.get()
    begun = monotonic()
    try:
        verdict = ["lived"]
        for tests in known.of(mutant):
            if tests and verdict == ["lived"]:
                verdict = worker.run(mutant, tests, 90 + 4 * known.seconds(tests))
    finally:
        workers.put(worker)
    how = "LIVED" if verdict == ["lived"] else f"noticed by {verdict[0] or 'no test'}: {verdict[1]}"
    print(f"{monotonic() - begun:5.0f} s  {mutant}\n         {how}", flush=True)
    return verdict


def broken_tests(worker: Worker, verdicts: Sequence[list[str]]) -> list[str]:
    """Return the tests among those that noticed a mutant which fail without one too, with their reasons."""
    left, broken = sorted({verdict[0] for verdict in verdicts if verdict[0] not in ("lived", "")}), []
    left = [test for test in left if "::" in test]
    while left:
        verdict = worker.run(None, left, 1800)
        if verdict == ["lived"]:
            break
        broken.append(": ".join(verdict))
        left = left[left.index(verdict[0]) + 1 :] if verdict[0] in left else []
    return broken


def table(mutants: Sequence[Mutant], verdicts: Sequence[list[str]]) -> str:
    """Return the mutants noticed by package, and a table of those that lived, to write reasons into."""
    lived: dict[str, list[bool]] = defaultdict(list)
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        for room in (mutant.package, "all"):
            lived[room].append(verdict == ["lived"])
    lines = ["| package | mutants | noticed | lived | share |", "|---|---|---|---|---|"]
    for room in sorted(lived, key=lambda room: (room == "all", room)):
        count, alive = len(lived[room]), sum(lived[room])
        lines.append(f"| {room} | {count} | {count - alive} | {alive} | {1 - alive / count:.0%} |")
    lines += ["", "| lived | reason |", "|---|---|"]
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        if verdict == ["lived"]:
            lines.append(f"| {str(mutant).replace('|', chr(92) + '|')} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutants of files whose path has this text"
    )
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="mutants that are tried at once")
    parser.add_argument("--coverage", action="store_true", help="run the suite with coverage anew")
    options = parser.parse_args()
    if options.coverage or not KEPT.exists():
        run_with_coverage()
    begun, known = monotonic(), KnownTests()
    mutants = draw_mutants(ROOT, options.seed, options.count, options.only)
    workers: Queue[Worker] = Queue()
    with ExitStack() as stack:
        for number in range(options.at_once):
            copy = Path(stack.enter_context(TemporaryDirectory(prefix="mutants-")))
            workers.put(Worker(copy, number))
            stack.callback(lambda: workers.get().close())
        with ThreadPoolExecutor(options.at_once) as threads:
            verdicts = list(threads.map(lambda mutant: try_mutant(workers, known, mutant), mutants))
        worker = workers.get()
        broken = broken_tests(worker, verdicts)
        workers.put(worker)
    for line in broken:
        print(f"fails without a mutant too: {line}")
    print(f"\nseed {options.seed}, {(monotonic() - begun) / 60:.0f} minutes\n\n{table(mutants, verdicts)}")
    kept: list[Any] = [[str(mutant), *verdict] for mutant, verdict in zip(mutants, verdicts, strict=True)]
    (KEPT / f"seed-{options.seed}.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
