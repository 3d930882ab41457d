"""A contestant as the controller sees it: a process for each rank, which answers each line."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

RANK = Path(__file__).with_name("rank.py")
GRACE = 5.0
"""Seconds for the other ranks to say why they fail, and for all of them to end."""
SECONDARY = ("CommunicationError", "DistBackendError", "DistNetworkError")
"""Errors of ranks that wait for one that has failed."""
WAITED = re.compile(r"plait: rank \d+ waits for ")
"""What plait says of a rank that it ends because an operation on its GPU does not finish."""


class NoResultError(Exception):
    """What became of a contestant instead: `error` or `no answer`, and the last line of what it said."""

    def __init__(self, fate: str, line: str) -> None:
        super().__init__(line)
        self.fate, self.line = fate, line


class Contestant:
    """The rank processes of a contestant, with torchrun's environment. A context manager that ends them."""

    def __init__(self, command: Sequence[str], ranks: int, timeout: float, log: Path) -> None:
        """`command` is run for each rank; its output goes to `log`, followed by the rank."""
        self.ranks = ranks
        self._command, self._timeout = list(command), timeout
        self._logs = [log.with_name(f"{log.name}-{rank}.txt") for rank in range(ranks)]
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue()

    def __enter__(self) -> Self:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        for rank, log in enumerate(self._logs):
            log.parent.mkdir(parents=True, exist_ok=True)
            read, write = os.pipe()
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*self._command, "--answers", str(write)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment_of(rank, self.ranks, port),
                    pass_fds=[write],
                    start_new_session=True,
                )
            os.close(write)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, read), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + (0.0 if error[0] is not None else GRACE)
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            end(process)

    def ask(self, order: str) -> list[dict[str, Any]]:
        """Send a line to every rank, and return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # it has ended, which its answer shows
                process.stdin.write(order + "\n")
                process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Return the next answer of each rank. Raises `NoResultError`."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout
        while len(found) < self.ranks:
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._write_stacks()
                raise NoResultError("no answer", f"no answer within {self._timeout:g} s") from None
            answer = json.loads(line) if line else {}
            if not line or "error" in answer:
                raise self._cause(rank, answer)
            found[rank] = answer
        return [found[rank] for rank in range(self.ranks)]

    def _write_stacks(self) -> None:
        """Make the ranks write their stacks to their logs."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR2)
        time.sleep(min(1.0, self._timeout))

    def _listen(self, rank: int, pipe: int) -> None:
        with os.fdopen(pipe) as lines:
            for line in lines:
                self._lines.put((rank, line))
        self._lines.put((rank, ""))  # its process has ended

    def _cause(self, first: int, answer: dict[str, Any]) -> NoResultError:
        """Return the first failure that is no vain wait for another rank; else that of the `first` rank."""
        failures = {first: self._failure(first, answer)}
        deadline = time.monotonic() + GRACE
        while len(failures) < self.ranks and all(is_secondary for is_secondary, _ in failures.values()):
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            said = json.loads(line) if line else {}
            if rank not in failures and (not line or "error" in said):
                failures[rank] = self._failure(rank, said)
        ordered = sorted(failures.values(), key=lambda failure: failure[0])  # stable: the first comes first
        return NoResultError("error", ordered[0][1])

    def _failure(self, rank: int, answer: dict[str, Any]) -> tuple[bool, str]:
        """Return whether a rank failed because of another one, and a text; no `answer`: its process ended."""
        if answer:
            return answer["kind"] in SECONDARY, f"rank {rank}: {answer['kind']}: {last_line(answer['error'])}"
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(GRACE)
        code, said = self._processes[rank].returncode, last_line(self._logs[rank].read_text())
        how = f"was ended by signal {-code}" if code is not None and code < 0 else "ended without an answer"
        return WAITED.match(said) is not None, f"rank {rank} {how}: {said}"


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a rank's process, with the variables that torchrun sets."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    defaults = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})
    return {**defaults, **os.environ, **{name: str(value) for name, value in given.items()}}


def command_of(
    contestant: dict[str, Any], work: dict[str, Any], device: str, timeout: float, ranks_per_gpu: int = 1
) -> list[str]:
    """Return the command of a rank. Ranks wait for each other half as long as the controller for them."""
    given = [json.dumps(contestant), json.dumps(work), "--device", device, "--timeout", f"{timeout / 2:g}"]
    shared = ["--ranks-per-gpu", str(ranks_per_gpu)] if ranks_per_gpu > 1 else []
    return [sys.executable, str(RANK), *given, *shared]


def last_line(text: str) -> str:
    """Return the last line with text, or the one by which plait ends a rank, which precedes stacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if WAITED.match(line)]
    return (named or lines or ["nothing was said"])[-1]


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session of its own, and all processes in it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
