"""Runs tests on one mutant after another, in a copy of the tree; started by `run.py`, one for each core.

It has torch and pytest imported and forks for each call, so that a run of tests begins within a second.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_IMPORTED = "torch", "torch.distributed", "numpy", "pydantic", "rich.console", "cloudpickle", "safetensors"


class Chosen:
    """A plugin of pytest that runs the tests asked for in their order, and says which fails first."""

    def __init__(self, tests: list[str], whole_files: set[str], result: Path) -> None:
        self.order = {test: at for at, test in enumerate(tests)}
        self.whole_files, self.result = whole_files, result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        last = len(self.order)
        wanted = [
            one
            for one in items
            if one.nodeid in self.order or one.nodeid.partition("::")[0] in self.whole_files
        ]
        items[:] = sorted(wanted, key=lambda one: self.order.get(one.nodeid, last))

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.result.exists():
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            self.result.write_text(json.dumps([report.nodeid, reason.strip().splitlines()[0][:120]]))


def serve(copy: Path, number: str) -> None:
    """Answer calls from standard input, a line of JSON each, until it ends."""
    for name in _IMPORTED:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_answer(copy, number, json.loads(line))), flush=True)


def _answer(copy: Path, number: str, call: dict[str, Any]) -> list[str]:
    """Return `["lived"]`, or how the mutant was noticed: the test and its reason."""
    changed = copy / call["path"] if call["path"] else None
    before = changed.read_bytes() if changed else b""
    result = copy / "build/result.json"
    result.unlink(missing_ok=True)
    if changed:
        _write(changed, call["source"].encode())
    process = os.fork()
    if not process:
        _run(copy, number, call, result)
    code = _exit_code(process, call["seconds"])
    if changed:
        _write(changed, before)
    if code is None:
        return ["", f"no end after {call['seconds']:.0f} s"]
    if result.exists():
        return list(json.loads(result.read_text()))
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ["lived"]
    last = (copy / "build/output.txt").read_text(errors="replace").strip().splitlines()[-1:]
    return ["", f"pytest ended with {code}: {''.join(last)}"]


def _write(file: Path, source: bytes) -> None:
    """Write a source with a time that no compiled module has: Python compares whole seconds and sizes."""
    file.write_bytes(source)
    moment = (file.parent.stat().st_mtime_ns % 1_000_000 + time.monotonic_ns() // 1_000_000) % 1_000_000_000
    os.utime(file, (moment, moment))


def _run(copy: Path, number: str, call: dict[str, Any], result: Path) -> None:
    """Run pytest in the copy; does not return."""
    os.setsid()
    os.chdir(copy)
    output = os.open(copy / "build/output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["PYTHONPATH"] = str(copy / "src")
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    sys.path[:0] = [str(copy / "src")]
    chosen = Chosen(call["tests"], set(call["whole_files"]), result)
    files = sorted({test.partition("::")[0] for test in call["tests"]} | chosen.whole_files)
    options = ["-x", "-p", "no:cacheprovider", f"--rootdir={copy}", f"--basetemp={copy}/build/temporary"]
    code = 3
    with suppress(SystemExit):
        code = int(
            pytest.main([*options, *(file for file in files if (copy / file).exists())], plugins=[chosen])
        )
    os._exit(code)


def _exit_code(process: int, seconds: float) -> int | None:
    """Wait for a process and end all that it started; return None where it took too long."""
    ends_at, code = time.monotonic() + seconds, None
    while code is None and time.monotonic() < ends_at:
        found, status = os.waitpid(process, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        os.waitpid(process, 0)
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
