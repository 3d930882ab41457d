"""How fast is plait's pipeline beside PyTorch's? Prints the tables of README.md.

All contestants live at the same time, in processes of their own, and take a step in turn (A B C A B C …): the
others are stopped while one works, so that a change in the machine's speed meets all. A ratio is taken inside
a turn; the median over turns counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import memory
from contestant import Contestant, play
from peers import PEERS
from split import LAYERS, backward_calls, by_plait, by_torch, live_between
from tables import between, print_table, processor, speed, timelines
from timeline import median_of

POLICIES = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "auto"]
TWO = ["plain", "plain-twice", *(f"torch-{name}" for name in PEERS), *(f"plait-{name}" for name in POLICIES)]
WATCHED = ["plait-1f1b", "plait-zb-h2", "plait-zb-v", "plait-auto"]
FOUR = {
    "plait-gpipe": "torch-GPipe",
    "plait-1f1b": "torch-1F1B",
    "plait-zb-v": "torch-ZBVZeroBubble",
    "plait-auto": "torch-1F1B",
}
"""Of four ranks: who stands beside whom."""
QUESTIONS = ("two", "four", "counts")


@contextmanager
def gathered(names: Sequence[str], ranks: int) -> Iterator[list[Contestant]]:
    """The contestants, ready. One starts after the other."""
    with ExitStack() as stack:
        contestants = []
        for name in names:
            batches = ranks if name == "plain-twice" else 1
            one = stack.enter_context(Contestant(name, 1 if name == "plain" else ranks, batches))
            one.stand()
            contestants.append(one)
            print(f"{name} on {one.ranks} is ready", file=sys.stderr)
        yield contestants


def two_ranks(names: Sequence[str], turns: int, warm: int) -> None:
    """Speed, and measured steps beside simulated ones."""
    with gathered(names, 2) as contestants:
        play(contestants, turns, warm)
        print_table("Two ranks", speed(contestants))
        watched = [one for one in contestants if one.name in WATCHED]
        play(watched, turns, 0, "watch")
    results = {one.name: median_of(one.seen) for one in watched}
    print_table("Measured and simulated", timelines(results))


def four_ranks(turns: int, warm: int) -> None:
    """CPU seconds."""
    with gathered(list(dict.fromkeys([*FOUR.values(), *FOUR])), 4) as contestants:
        play(contestants, turns, warm)
        print_table("Four ranks on two cores: CPU seconds of a step", processor(contestants, FOUR))


def counts() -> None:
    """What is alive when, and what is done how often."""
    live = {
        what: (live_between(by_plait, part), live_between(by_torch, part)) for what, part in LAYERS.items()
    }
    print_table("Alive between input gradient and weight gradient", between(live))
    calls = [["backwards of a Function", backward_calls(by_plait), backward_calls(by_torch)]]
    print_table("For one micro-batch, backward split", (["", "plait", "PyTorch"], calls))
    rows = [
        [
            f"{side}, rank {rank}",
            *(f"{kept[rank].most / 2**20:.1f} ({kept[rank].buffers})" for kept in by_count),
        ]
        for policy, peer in memory.PAIRS.items()
        for side, by_count in (
            (f"plait-{policy}", memory.measure(policy, ours=True)),
            (f"torch-{peer}", memory.measure(policy, ours=False)),
        )
        for rank in range(memory.RANKS)
    ]
    columns = ["", *(f"{count} micro-batches" for count in memory.COUNTS)]
    print_table("Alive at most in a step, MiB (receive buffers)", (columns, rows))


def main() -> None:
    """Answer the questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2, help="steps of each that do not count")
    parser.add_argument("--question", choices=QUESTIONS, action="append", help="default: all")
    parser.add_argument("--only", nargs="+", default=TWO, help="contestants on two ranks; `plain` first")
    arguments = parser.parse_args()
    questions = arguments.question or QUESTIONS
    if "two" in questions:
        two_ranks(arguments.only, arguments.turns, arguments.warm)
    if "four" in questions:
        four_ranks(arguments.turns, arguments.warm)
    if "counts" in questions:
        counts()


if __name__ == "__main__":
    main()
