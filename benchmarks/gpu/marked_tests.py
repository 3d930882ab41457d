"""The tests marked `gpu`, one by one, each in a process of its own: a row for each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from contestants import end, last_line
from report import ROOT, Row

PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "default", "-q"]
"""The ranks' own processes never turn warnings into errors; here, too, a warning of torch must not."""


def rows(device: str, ranks: int, timeout: float, ranks_per_gpu: int = 1) -> Iterator[Row]:
    """Run each test on `ranks` GPUs, each of `ranks_per_gpu`, or on CPU ranks, and yield its row."""
    where = f"{device}:{ranks_per_gpu if device == 'cuda' else ranks}"
    options = ["-m", "gpu", "--gpu-tests-on", where]
    code, said = run([*PYTEST, *options, "--collect-only", "tests/gpu"], device, ranks, timeout)
    tests = [line for line in said.splitlines() if "::" in line]
    if code != 0 or not tests:
        fate, line = ("no answer", said) if code is None else ("error", last_line(said))
        yield Row("tests", "all", None, fate, notes=line)
        return
    for test in tests:
        yield outcome(test, options, device, ranks, timeout)


def outcome(test: str, options: list[str], device: str, ranks: int, timeout: float) -> Row:
    """Run one test, and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.xml")
        code, said = run([*PYTEST, *options, "--junitxml", str(file), test], device, ranks, timeout)
        if code is None:
            return Row("tests", title(test), None, "no answer", notes=said)
        try:
            case = ElementTree.parse(file).getroot().find(".//testcase")
        except (OSError, ElementTree.ParseError):
            case = None
    if case is None:
        return Row("tests", title(test), None, "error", notes=last_line(said))
    for tag, fate in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return Row("tests", title(test), None, fate, notes=last_line(found.get("message", "")))
    return Row("tests", title(test), None, "passed", notes=f"{float(case.get('time', 0)):.0f} s")


def title(test: str) -> str:
    """Return a test's name in words: `parity: every gradient is that of one rank [tp 2]`."""
    file, _, name = test.partition("::")
    words, _, row = name.removeprefix("test_").partition("[")
    module = Path(file).stem.removeprefix("test_")
    return f"{module}: {words} {f'[{row}' if row else ''}".replace("_", " ").strip()


def run(command: list[str], device: str, ranks: int, timeout: float) -> tuple[int | None, str]:
    """Run a command; return its exit code, None after `timeout` seconds, and its output."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **visible(device, ranks)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {timeout:g} s"
        finally:
            end(process)  # and what it has left behind
        return process.returncode, said


def visible(device: str, ranks: int) -> dict[str, str]:
    """Return the environment variable that shows only the first `ranks` of the visible GPUs."""
    if device != "cuda":
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(ranks))) if shown is None else shown.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:ranks])}
