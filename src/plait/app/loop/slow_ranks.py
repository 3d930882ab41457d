"""Which ranks compute more slowly than others: a sequential test on the times of all ranks.

Times come in windows of a few steps, each rank's median. A rank's ratio is its time by the median of its
peers, the ranks with the same stages; where there are none, by what the costs of its layers predict of the
others, and by what its own first windows were. Each window adds to a rank's evidence the logarithm of how
much likelier its ratio is for a rank that takes 1.56 times as long than for one that is like its peers, if
ratios scatter as they did: a sum that never falls below 0 (CUSUM: Page, "Continuous inspection schemes",
1954). The scatter is that of the changes of ratios from one window to the next, by their median. One
window adds a bounded amount, so that disturbed steps in a few of them are never enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log, sqrt
from statistics import median

SLOWER = 1.25
"""Above this ratio a window is evidence that a rank is slow, below that it is not."""
UNEXPECTED = 1.6
"""The same for a rank without peers before its own usual ratio is known: costs of layers are estimates."""
MOST_EVIDENCE = 5.0
"""Of one window."""
LEARNT, REMEMBERED = 3, 20
"""Windows from which a usual ratio, and the scatter of ratios, are known."""
LEAST_SCATTER, ASSUMED_SCATTER, NORMAL = 0.05, 0.1, 1.4826
"""Standard deviations of logarithms: at least, and before it is known; what of a median one they are."""
SHORTEST = 1e-9
"""Seconds: shorter times count as this one."""
OF_STEP = 0.02
"""The part of a step by which a slow rank is slower, at least."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes more slowly than its peers."""

    rank: int
    factor: float
    """How many times as long as they it takes."""
    since: int
    """About the first step in which it was slow, counted from 1."""


@dataclass
class _RankHistory:
    """The measurements of one rank so far, and the evidence that it is slow."""

    logs: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The logarithms of its last ratios."""
    usual: list[float] = field(default_factory=list)
    """The logarithms of the first ratios, of a rank without peers."""
    evidence: float = 0.0
    """That it is slow; for one that is slow, that it no longer is."""
    since: int = 0
    """The first step whose window added to it."""
    windows: int = 0
    """How many windows have added to it."""


class SlowRanks:
    """Finds slow ranks in the times of all ranks; every rank finds the same, since it has the same times."""

    def __init__(self, places: Sequence[int], predicted: Sequence[float], windows: int) -> None:
        """`places`: each rank's index along `pp`; ranks with the same one do the same work.

        `predicted`: of each rank, the cost of its layers, in any unit. `windows`: the fewest after which a
        rank is slow, or no longer.
        """
        self.slow: dict[int, SlowRank] = {}
        """Those that are slow now, by rank."""
        self.ratios: list[float] = []
        """Of each rank: how many times as long as its peers it took in the last window."""
        self._enough = MOST_EVIDENCE * windows
        self._peers = [
            [other for other, place in enumerate(places) if place == own and other != rank]
            for rank, own in enumerate(places)
        ]
        self.expect(predicted)

    def expect(self, predicted: Sequence[float], *, measured: bool = False) -> None:
        """Set the expected costs with which ranks without peers are compared; forget all earlier ratios.

        `measured`: the costs were measured in this run, and need no ratios of first windows.
        """
        self._predicted = list(predicted)
        self._histories = [_RankHistory(usual=[0.0] * LEARNT if measured else []) for _ in predicted]

    def peers(self, rank: int) -> Sequence[int]:
        """Return the ranks that do the same work as `rank`."""
        return self._peers[rank]

    def add(self, first: int, seconds: Sequence[float], step: float) -> tuple[list[SlowRank], list[int]]:
        """Add a window of steps; return the ranks newly found slow, and those no longer slow.

        `first`: its first step; `seconds`: for how long each rank computed in a step that took `step`.
        """
        scatter = self._scatter()
        seconds = [max(one, SHORTEST) for one in seconds]
        found, ended = [], []
        for rank, own in enumerate(self._histories):
            ratio = self._ratio(rank, seconds)
            usual = self._usual(rank)
            known = ratio if usual is None else ratio - usual
            own.logs.append(known)
            least = log(SLOWER if self._peers[rank] or usual is not None else UNEXPECTED)
            if seconds[rank] * (1 - exp(-known)) < OF_STEP * step:
                known = min(known, 0.0)
            more = 2 * log(SLOWER) / scatter**2 * (known - least)
            self._collect(own, -more if rank in self.slow else more, first)
            if own.evidence >= self._enough and rank in self.slow:
                del self.slow[rank]
                ended.append(rank)
                own.evidence = 0.0
            elif own.evidence >= self._enough:
                factor = exp(median([*own.logs][-own.windows :]))
                self.slow[rank] = SlowRank(rank, factor, own.since)
                found.append(self.slow[rank])
                own.evidence = 0.0
            if not self._peers[rank] and rank not in self.slow and ratio < log(UNEXPECTED):
                own.usual = [*own.usual, ratio][:LEARNT]
        self.ratios = [exp(own.logs[-1]) for own in self._histories]
        return found, ended

    def _collect(self, own: _RankHistory, more: float, first: int) -> None:
        """Add one window's ratio to the evidence that a rank is slow, or is no longer slow."""
        if own.evidence == 0.0:
            own.since, own.windows = first, 0
        own.evidence = max(0.0, own.evidence + max(-MOST_EVIDENCE, min(more, MOST_EVIDENCE)))
        own.windows += 1

    def _ratio(self, rank: int, seconds: Sequence[float]) -> float:
        """Return the logarithm of how many times as long as its peers a rank took, or as predicted."""
        if self._peers[rank]:
            return log(seconds[rank] / median(seconds[peer] for peer in self._peers[rank]))
        scaled = [one / predicted for one, predicted in zip(seconds, self._predicted, strict=True)]
        return log(scaled[rank] / median(one for other, one in enumerate(scaled) if other != rank))

    def _usual(self, rank: int) -> float | None:
        """Return the median log-ratio of the first windows of a rank without peers; None while too few."""
        usual = self._histories[rank].usual
        return median(usual) if len(usual) == LEARNT else None

    def _scatter(self) -> float:
        """Return the standard deviation of the ranks' log-ratios, estimated from changes between windows."""
        changes = [ASSUMED_SCATTER * sqrt(2) / NORMAL] * len(self._histories) * LEARNT
        for one in self._histories:
            changes += [abs(later - earlier) for earlier, later in pairwise(one.logs)]
        return max(LEAST_SCATTER, NORMAL / sqrt(2) * median(changes))
