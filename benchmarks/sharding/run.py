"""How fast is plait's sharded data parallelism beside PyTorch's own? Prints the tables of README.md.

plait and its peer live at the same time, in processes of their own, and take a step in turn (A B A B …): one
pair waits while the other one works, so that a change in the machine's speed meets both. A ratio is taken
inside a turn; the median over turns counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from work import RANKS, TOKENS, payload

RANK = Path(__file__).with_name("rank.py")
MEBI = 2**20


@dataclass(frozen=True)
class Pair:
    """Two contestants of one policy, and how many times as fast plait should be."""

    policy: str
    plait: str
    peer: str
    target: float | None = None


PAIRS = {
    "last": Pair("full, reduced last", "plait-full-last", "fsdp2-last", 1.5),
    "gradients": Pair(
        "gradients, reduced last", "plait-gradients-last", "fsdp2-whole-for-a-microbatch", 1.35
    ),
    "kept": Pair("gradients, reduced last", "plait-gradients-last", "fsdp2-whole-for-a-step"),
    "each": Pair("full, reduced each", "plait-full-each", "fsdp2-each", 1.5),
    "none": Pair("none", "plait-none-last", "ddp", 0.99),
    "last-by-blocks": Pair("full, reduced last", "plait-full-last", "fsdp2-last-by-blocks"),
    "each-by-blocks": Pair("full, reduced each", "plait-full-each", "fsdp2-each-by-blocks"),
}
DEFAULT = ["last", "gradients", "kept", "each", "none"]


@dataclass
class Contestant:
    """The processes of one contestant, and what they say. A context manager."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Of the rank that took longest."""
    last_words: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(RANK), self.name, str(rank), store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        self._heard()
        return self

    def step(self) -> None:
        """Let it take a step."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        self.steps.append(max(self._heard(), key=lambda words: float(words["seconds"])))

    def finish(self) -> None:
        """Let it tell of the whole run."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        self.last_words = self._heard()

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            if not self.last_words:
                rank.kill()
            rank.wait()
        self._folder.cleanup()

    def seconds(self, warm: int) -> list[float]:
        """Of each step that counts."""
        return [float(step["seconds"]) for step in self.steps[warm:]]

    @property
    def peak(self) -> float:
        """MiB that were resident at most, on the rank that had most."""
        return max(float(words["peak"]) for words in self.last_words) / MEBI

    def _heard(self) -> list[dict[str, Any]]:
        """A line of each rank."""
        lines = []
        for rank in self._ranks:
            assert rank.stdout is not None
            lines.append(rank.stdout.readline())
        if not all(lines):
            raise SystemExit(f"{self.name} ended early; its message stands above.")
        return [json.loads(line) for line in lines]


def play(pair: Pair, turns: int, warm: int) -> tuple[Contestant, Contestant]:
    """Let both take `turns` steps in turn, after `warm` ones each that do not count."""
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(Contestant(name)) for name in (pair.plait, pair.peer))
        for _ in range(warm + turns):
            ours.step()
            theirs.step()
        for one, other in zip(ours.steps, theirs.steps, strict=True):
            assert abs(one["loss"] - other["loss"]) < 1e-5 * other["loss"], "they train the same model"
        ours.finish()
        theirs.finish()
    return ours, theirs


def row(pair: Pair, ours: Contestant, theirs: Contestant, warm: int) -> str:
    """Of the table of speed and memory."""
    one, other = ours.seconds(warm), theirs.seconds(warm)
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    cells = [
        pair.policy,
        pair.peer,
        *(f"{TOKENS / statistics.median(seconds):.0f}" for seconds in (one, other)),
        f"{statistics.median(ratios):.2f}",
        "" if pair.target is None else f"{pair.target}",
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
        *(f"{contestant.peak:.0f}" for contestant in (ours, theirs)),
    ]
    return f"| {' | '.join(cells)} |"


def payload_rows(contestant: Contestant) -> list[str]:
    """Of the table of payload: what a rank of plait handed in, and the formula."""
    _, strategy, reduce = contestant.name.split("-")
    moved = contestant.last_words[0]["moved"]
    rows = []
    for kind, expected in payload(strategy, reduce).items():
        counted = moved[kind]
        rows.append(
            f"| {strategy}, {reduce} | {kind} | {counted:,} | {expected:,.0f} | {counted / expected:.4f} |"
        )
    return rows


def main() -> None:
    """Play the pairs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--warm", type=int, default=3, help="steps of each that do not count")
    parser.add_argument("--only", choices=PAIRS, action="append", help="play this pair (may be repeated)")
    arguments = parser.parse_args()
    rows, payloads = [], {}
    for name in arguments.only or DEFAULT:
        ours, theirs = play(PAIRS[name], arguments.turns, arguments.warm)
        rows.append(row(PAIRS[name], ours, theirs, arguments.warm))
        payloads[ours.name] = payload_rows(ours)
        print(f"{name} is done", file=sys.stderr)
    columns = ["policy", "peer", *(f"{one}, tokens/s" for one in ("plait", "peer")), "ratio", "target"]
    columns += ["each turn", "plait, MiB", "peer, MiB"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", *rows, sep="\n")
    print("\n| plait | payload of a step | bytes, counted | by the formula | ratio |\n|---|---|---|---|---|")
    print(*(line for lines in payloads.values() for line in lines), sep="\n")


if __name__ == "__main__":
    main()
