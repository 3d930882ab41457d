"""Which tests run a line: from one run of the quick suite with coverage by test, which is kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path, PurePath

from coverage import CoverageData
from mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build/mutation"
SECONDS = 15.0, 45.0
"""What tests of one mutant took in the run with coverage: those tried first, and the others."""
_POOL = "src/plait/ranks/launch/rank_pool.py"
"""What tests with ranks as processes run in their own."""
_LEAST = 0.01
"""Seconds that a test counts with at least."""


def run_with_coverage() -> None:
    """Run the quick suite with coverage; keep which lines each test ran, its time, and the sources."""
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"]
    command += [
        "--cov=src/plait",
        "--cov-context=test",
        "--cov-report=",
        "--durations=0",
        "--durations-min=0.005",
    ]
    # A line is looked up with its test in C; the core for newer versions of Python knows no tests.
    variables = {"COVERAGE_FILE": str(KEPT / "coverage"), "COVERAGE_CORE": "ctrace"}
    with (KEPT / "durations.txt").open("w") as output:
        subprocess.run(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *command],
            cwd=ROOT,
            stdout=output,
        )
    shutil.copytree(
        ROOT / "src/plait", KEPT / "sources/src/plait", ignore=shutil.ignore_patterns("__pycache__")
    )


class KnownTests:
    """The tests of the kept run, by the lines that they ran."""

    def __init__(self) -> None:
        self._data = CoverageData(str(KEPT / "coverage"))
        self._data.read()
        self._files = {re.sub(r".*?(?=src/plait/)", "", file): file for file in self._data.measured_files()}
        self._seconds: Counter[str] = Counter()
        for line in (KEPT / "durations.txt").read_text().splitlines():
            found = re.match(r"([\d.]+)s (?:call|setup|teardown) +(\S.*)", line)
            if found:
                self._seconds[found[2]] += float(found[1])

    def of(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return the tests of a mutant's line, nearest first: those to try first, and those to try then.

        They run the line, then those that run its module otherwise, then those of its package, for lines that
        run on import alone, then those with ranks as processes, whose lines were not seen.
        """
        lines = self._tests_by_line(mutant.path)
        of_line = self._of_line(mutant, lines)
        of_module = set().union(*lines.values()) - of_line
        of_package = (
            {test for test in self._seconds if _distance(mutant.path, test) <= 2} - of_line - of_module
        )
        of_ranks = set().union(*self._tests_by_line(_POOL).values()) - of_line - of_module - of_package
        kinds = of_line, of_module, of_package, of_ranks
        chosen = [test for tests in kinds for test in self._nearest(mutant, tests)]
        parts: tuple[list[str], list[str]] = [], []
        taken = 0.0
        for test in chosen:
            taken += max(_LEAST, self._seconds[test])
            if taken < sum(SECONDS):
                parts[taken >= SECONDS[0]].append(test)
        return parts

    def seconds(self, tests: Iterable[str]) -> float:
        """Return what tests took in the run with coverage."""
        return sum(max(_LEAST, self._seconds[test]) for test in tests)

    def _tests_by_line(self, path: str) -> dict[int, set[str]]:
        if path not in self._files:
            return {}
        by_line = self._data.contexts_by_lineno(self._files[path])
        return {
            line: {context.rpartition("|")[0] for context in contexts if context.endswith("|run")}
            for line, contexts in by_line.items()
        }

    def _of_line(self, mutant: Mutant, lines: dict[int, set[str]]) -> set[str]:
        """Return the tests that ran the line, or the nearest one before it in its function."""
        old = (KEPT / "sources" / mutant.path).read_text().splitlines() if lines else []
        now = (ROOT / mutant.path).read_text().splitlines()
        was = {
            block.b + at: block.a + at
            for block in SequenceMatcher(None, old, now, autojunk=False).get_matching_blocks()
            for at in range(block.size)
        }
        for line in range(mutant.line - 1, -1, -1):
            if re.match(r"\s*(async )?def |class ", now[line]):
                return set()
            if line in was and lines.get(was[line] + 1):
                return lines[was[line] + 1]
        return set()

    def _nearest(self, mutant: Mutant, tests: set[str]) -> list[str]:
        """Return tests by how far their file is from the mutant's; of a test's cases the quickest first."""
        cases: Counter[str] = Counter()
        order = {}
        for test in sorted(tests, key=lambda test: (self._seconds[test], test)):
            function = test.partition("[")[0]
            order[test] = _distance(mutant.path, test) + cases[function] / 2, self._seconds[test], test
            cases[function] += 1
        return sorted(order, key=order.__getitem__)


def mirrored(path: str) -> str:
    """Return the test file of a source file."""
    own = PurePath(path).relative_to("src/plait")
    return f"tests/unit/{own.parent / f'test_{own.name}'}".replace("/./", "/")


def _distance(path: str, test: str) -> int:
    """Return 0 for a file's own tests, 1 for its folder's, 2 for its package's, 3 for other units, else 4."""
    own, file = PurePath(mirrored(path)), PurePath(test.partition("::")[0])
    if file == own:
        return 0
    if file.parent == own.parent:
        return 1
    if len(file.parts) > 3 and file.parts[:3] == own.parts[:3]:
        return 2
    return 3 if file.parts[1] == "unit" else 4
