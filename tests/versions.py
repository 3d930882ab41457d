"""Runs the quick tests with the oldest versions of the dependencies, and with the newest; prints a table.

    .venv/bin/python tests/versions.py                                       # as `make versions`
    .venv/bin/python tests/versions.py --rows newest --python python3.13 --folder DIR -- tests/unit/models

Each row is a new environment, with plait of this folder: several GB each, most of them torch's, which are
removed afterwards unless `--folder` keeps them. uv, which pip installs there, finds the versions.

    oldest          requirements and extras at their lower bounds; without transformers, which needs more
    transformers    the oldest that fit together, with transformers and peft
    newest          the newest that fit together
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TOOLS = frozenset({"build", "mypy", "plait", "ruff"})
"""Requirements that no quick test needs; `plait` stands for the tools of the documentation."""
TRANSFORMERS = frozenset({"transformers", "peft"})
ROWS = {
    "oldest": ("lowest-direct", TRANSFORMERS),
    "transformers": ("lowest-direct", frozenset[str]()),
    "newest": ("highest", frozenset[str]()),
}
"""How uv chooses versions, and requirements that are left out."""
SHOWN = ("torch", "numpy", "pydantic", "rich", "cloudpickle", "safetensors", "shtab")
ALSO_SHOWN = ("tensorboard", "tokenizers", "datasets", "transformers", "peft", "hypothesis", "pytest")


@dataclass(frozen=True)
class Outcome:
    """The tests of one row."""

    row: str
    python: str
    versions: dict[str, str]
    counts: dict[str, int]
    """By kind: tests, failures, errors, skipped."""
    seconds: float
    failed: Sequence[str]


def requirements(left_out: frozenset[str]) -> list[str]:
    """Return the requirements of plait and its extras, without tools and those of `left_out`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        one for name, some in project["optional-dependencies"].items() if name != "docs" for one in some
    ]
    every = dict.fromkeys([*project["dependencies"], *extras])
    return [one for one in every if re.split(r"[\[<>=]", one)[0] not in TOOLS | left_out]


def installed(row: str, python: str, folder: Path) -> Path:
    """Return the interpreter of a new environment with the versions of a row."""
    resolution, left_out = ROWS[row]
    uv, target = folder / "uv/bin/uv", folder / f"{row}-{Path(python).name}"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "uv"], check=True)
        subprocess.run([folder / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    interpreter = target / "bin/python"
    if not interpreter.exists():
        install = [uv, "pip", "install", "--quiet", "--python", interpreter]
        subprocess.run([uv, "venv", "--quiet", "--python", python, target], check=True)
        subprocess.run([*install, "--resolution", resolution, *requirements(left_out)], check=True)
        subprocess.run([*install, "--no-deps", "--editable", ROOT], check=True)
    return interpreter


def outcome(row: str, python: str, folder: Path, arguments: Sequence[str]) -> Outcome:
    """Return what the tests give with the versions of a row."""
    interpreter = installed(row, python, folder)
    report = folder / f"{row}-{Path(python).name}.xml"
    report.unlink(missing_ok=True)
    options = ["-n", "2", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [interpreter, "-m", "pytest", *options, *arguments], cwd=ROOT, env=environment, check=False
    )
    listed = subprocess.run(
        [folder / "uv/bin/uv", "pip", "list", "--quiet", "--format", "json", "--python", interpreter],
        check=True,
        capture_output=True,
    )
    version = subprocess.run([interpreter, "-V"], check=True, capture_output=True, text=True).stdout.split()[
        1
    ]
    versions = {one["name"]: one["version"] for one in json.loads(listed.stdout)}
    if not report.exists():
        return Outcome(row, version, versions, {}, 0.0, ["the run itself"])
    suite = next(ElementTree.parse(report).iter("testsuite"))
    kinds = ("tests", "failures", "errors", "skipped")
    counts = {kind: int(suite.attrib[kind]) for kind in kinds}
    return Outcome(row, version, versions, counts, float(suite.attrib["time"]), list(failures(suite)))


def failures(suite: ElementTree.Element) -> Iterator[str]:
    """Yield the names of the tests that failed."""
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown, and below it the tests that failed."""
    columns = ("versions", "Python", *SHOWN, *ALSO_SHOWN, "passed", "failed", "skipped", "seconds")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for one in outcomes:
        count = one.counts.get
        bad = count("failures", 0) + count("errors", 0)
        passed = count("tests", 0) - bad - count("skipped", 0)
        found = [one.versions.get(name, "–") for name in (*SHOWN, *ALSO_SHOWN)]
        numbers = [str(number) for number in (passed, bad, count("skipped", 0), round(one.seconds))]
        lines.append(f"| {' | '.join([one.row, one.python, *found, *numbers])} |")
    lines += [f"\n{one.row}, Python {one.python}: {name} failed" for one in outcomes for name in one.failed]
    return "\n".join(lines)


def main() -> int:
    """Run the rows that are asked for; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters, python3.13 ...")
    parser.add_argument("--folder", type=Path, help="where environments are made and kept")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    missing = [one for one in given.python if which(one) is None]
    if missing:
        parser.error(f"there is no {' '.join(missing)}")
    with TemporaryDirectory(prefix="plait-versions-") as made:
        folder = Path(made) if given.folder is None else given.folder.absolute()
        outcomes = [
            outcome(row, python, folder, given.tests) for python in given.python for row in given.rows
        ]
    print(table(outcomes))
    return any(one.failed for one in outcomes)


if __name__ == "__main__":
    sys.exit(main())
