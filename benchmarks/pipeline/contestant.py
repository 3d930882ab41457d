"""A contestant as the benchmark sees it: processes of its own that take a step when they are told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

RANK = Path(__file__).with_name("rank.py")


@dataclass
class Contestant:
    """What its ranks say. A context manager: the processes live inside it."""

    name: str
    ranks: int
    batches: int = 1
    """That it trains on in a step: more than one if its processes know nothing of each other."""
    seconds: list[float] = field(default_factory=list)
    """For a batch in each step, of the rank that took longest."""
    processor: list[float] = field(default_factory=list)
    """User and system time for a batch in each step, all ranks together."""
    losses: list[float] = field(default_factory=list)
    seen: list[list[Any]] = field(default_factory=list)
    """Of each watched step: what was recorded."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(RANK), self.name, str(rank), str(self.ranks), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(self.ranks)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            if error[0] is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        self._folder.cleanup()

    def stand(self) -> None:
        """Wait until it is ready to take a step, and stop it until then."""
        self._heard()
        self._signal(signal.SIGSTOP)

    def step(self, order: str = "step") -> None:
        """Let it take a step; `watch`, and tell what its ranks did when."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        words = self._heard()
        self._signal(signal.SIGSTOP)
        self.losses.append(next(word["loss"] for word in words if word["loss"] is not None))
        if order == "watch":
            self.seen.append(words[0]["seen"])
        else:
            self.seconds.append(max(word["seconds"] for word in words) / self.batches)
            self.processor.append(sum(word["processor"] for word in words) / self.batches)

    def _signal(self, number: signal.Signals) -> None:
        """Stop its processes or let them go on: threads of idle backends wake a hundred times a second."""
        for process in self._processes:
            process.send_signal(number)

    def _heard(self) -> list[dict[str, Any]]:
        """A line of each rank."""
        lines = []
        for process in self._processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
        if not all(lines):
            raise SystemExit(f"{self.name} ended early; its message stands above.")
        return [json.loads(line) for line in lines]


def play(contestants: Iterable[Contestant], turns: int, warm: int, order: str = "step") -> None:
    """Let each take a step in turn (A B C A B C …), `turns` times after `warm` ones that do not count."""
    contestants = list(contestants)
    for _ in range(warm + turns):
        for contestant in contestants:
            contestant.step(order)
    for contestant in contestants:
        for one, other in zip(contestant.losses, contestants[0].losses, strict=True):
            assert abs(one - other) < 1e-5 * other, f"{contestant.name} trains another model"
        for told in (contestant.seconds, contestant.processor, contestant.seen):
            del told[: max(0, len(told) - turns)]
