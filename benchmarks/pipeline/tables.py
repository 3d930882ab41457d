"""The tables of README.md, from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from contestant import Contestant
from timeline import Result
from work import TOKENS

MEBI = 2**20
Table = tuple[Sequence[str], Iterable[Sequence[object]]]
"""Columns, and rows."""


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [one / other for one, other in zip(over, under, strict=True)]


def best_peer(contestants: Sequence[Contestant]) -> Contestant:
    """PyTorch's fastest schedule, by the median of its ratio to the first contestant."""
    base = contestants[0].seconds
    peers = [contestant for contestant in contestants if contestant.name.startswith("torch")]
    return max(peers, key=lambda peer: median(ratios(base, peer.seconds)))


def speed(contestants: Sequence[Contestant]) -> Table:
    """Of two ranks, beside one plain process and PyTorch's best."""
    base, best = contestants[0], best_peer(contestants)
    rows = []
    for one in contestants:
        beside = [ratios(other.seconds, one.seconds) for other in (base, best)]
        rows.append(
            [
                one.name,
                f"{TOKENS / median(one.seconds):.0f}",
                *(f"{median(turns):.2f}" for turns in beside),
                f"{median(ratios(one.processor, base.processor)):.2f}",
                ", ".join(f"{turn:.2f}" for turn in beside[0]),
                ", ".join(f"{turn:.2f}" for turn in beside[1]),
            ]
        )
    heads = [base.name, best.name]
    columns = ["", "tokens/s", *(f"× {head}" for head in heads), f"CPU seconds, × {base.name}"]
    return [*columns, *(f"× {head}, each turn" for head in heads)], rows


def processor(contestants: Sequence[Contestant], pairs: Mapping[str, str]) -> Table:
    """CPU seconds of a step, all ranks together; `pairs` say who stands beside whom."""
    by_name = {contestant.name: contestant for contestant in contestants}
    rows = []
    for ours, theirs in pairs.items():
        one, other = by_name[ours].processor, by_name[theirs].processor
        turns = ratios(one, other)
        rows.append(
            [
                ours,
                theirs,
                *(f"{median(seconds):.2f}" for seconds in (one, other)),
                f"{median(turns):.3f}",
                ", ".join(f"{turn:.3f}" for turn in turns),
            ]
        )
    return ["plait", "PyTorch", "plait, s", "PyTorch, s", "plait / PyTorch", "each turn"], rows


def timelines(results: Mapping[str, Result]) -> Table:
    """Measured steps beside simulated ones, and what the ranks did meanwhile, in milliseconds."""

    def each(times: Sequence[float]) -> str:
        return ", ".join(f"{rank:.0f}" for rank in times)

    rows = [
        [
            name,
            result.policy,
            f"{result.measured:.0f}",
            f"{result.simulated:.0f}",
            f"{result.ratio:.3f}",
            f"{result.comm:.1f}",
            each(result.computing),
            each(result.waiting),
        ]
        for name, result in results.items()
    ]
    columns = ["", "order", "measured, ms", "simulated, ms", "measured / simulated", "a message, ms"]
    return [*columns, "computing of each rank, ms", "waiting of each rank, ms"], rows


def between(live: Mapping[str, tuple[int, int]]) -> Table:
    """What is alive between input and weight gradient."""
    rows = [
        [what, *(f"{side / MEBI:.2f}" for side in sides), f"{sides[0] / sides[1]:.2f}"]
        for what, sides in live.items()
    ]
    return ["layers", "plait, MiB", "PyTorch, MiB", "plait / PyTorch"], rows


def print_table(title: str, table: Table) -> None:
    """As Markdown."""
    columns, rows = table
    print(f"\n{title}\n\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
