"""The load of each expert over the steps of a run, drawn as maps, and the tokens that ranks sent each other.

Both are read from `experts.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plait.files import validated
from plait.pictures.report.metrics import EXPERTS_FILE, MOST, lines_of, means_of_stretches
from plait.pictures.svg_elements import inline_svg, path, text_at

MOST_ROUTERS = 32
"""Routers that are drawn; of more, evenly spaced ones with the first and the last."""
_WIDTH, _HEADING, _GAP = 860, 18, 10
_CELLS = 60_000
"""Cells of all maps together, at most; of more steps, means over stretches of them."""
_SHADES = (
    *("#00224e", "#1b3b6d", "#35456c", "#4e576c", "#666970", "#7d7c75"),
    *("#948e77", "#aea371", "#c8b866", "#e1ce56", "#f4dc46", "#fee838"),
)
"""From no token to twice the mean and more (cividis, Nuñez et al. 2018)."""


@dataclass(frozen=True)
class ExpertLoads:
    """For each step the tokens of each expert as multiples of their layer's mean, by path of the router."""

    steps: tuple[int, ...]
    loads: Mapping[str, tuple[tuple[float, ...], ...]]
    """For each step a number for each expert."""
    sent: tuple[float, ...] = ()
    """Of each rank: the tokens that it sent to experts of other ranks, the mean of the steps."""
    received: tuple[float, ...] = ()
    """Of each rank: the tokens that it received from other ranks, the mean of the steps."""
    forced: int = 0
    """In how many of the steps routing was forced to be balanced."""

    @property
    def shown(self) -> list[str]:
        """The paths of the routers that are drawn."""
        paths, last = list(self.loads), min(MOST_ROUTERS, len(self.loads)) - 1
        return [paths[number * (len(paths) - 1) // max(last, 1)] for number in range(last + 1)]

    def draw(self) -> str:
        """Return an SVG with a heat map for each router in `shown`: a row per expert, steps left to right."""
        rows = sum(len(self.loads[one][0]) for one in self.shown)
        height = 12.0 if rows <= 64 else 6.0 if rows <= 512 else 3.0
        columns = max(8, min(300, _CELLS // rows))
        elements, top = list[str](), 0.0
        for router in self.shown:
            _, means = means_of_stretches(self.loads[router], columns)
            elements.append(text_at(0, top + _HEADING - 5, router))
            elements += _map(means, top + _HEADING, height)
            top += _HEADING + height * len(means) + _GAP
        return inline_svg("Load of experts over the steps", _WIDTH, top, elements)


def _map(rows: Sequence[Sequence[float]], top: float, height: float) -> Iterator[str]:
    """Yield a path for each shade, of the cells that have it."""
    width = _WIDTH / len(rows[0])
    cells: dict[int, list[str]] = {}
    for number, row in enumerate(rows):
        for column, load in enumerate(row):
            shade = min(int(load / 2 * len(_SHADES)), len(_SHADES) - 1)
            place = f"M{column * width:.1f} {top + number * height:g}h{width:.1f}v{height:g}h-{width:.1f}z"
            cells.setdefault(shade, []).append(place)
    for shade, places in sorted(cells.items()):
        yield path("".join(places), fill=_SHADES[shade])


def read_expert_loads(folder: Path) -> ExpertLoads | None:
    """Return the loads of experts in `folder`; None if there are none. Skips damaged lines."""
    rows: list[_LoadRow] = []
    for line in lines_of(folder / EXPERTS_FILE):
        with suppress(ValueError):
            row = validated(_LoadRow, line)
            counts = *row.tokens.values(), row.sent, row.received
            if row.tokens and all(0 <= one < MOST for each in counts for one in each):
                rows.append(row)
    shape = _shape(rows[-1]) if rows else {}
    rows = [row for row in rows if _shape(row) == shape and all(shape.values())]
    if not rows:
        return None
    loads = {path: tuple(_multiples(row.tokens[path]) for row in rows) for path in shape}
    return ExpertLoads(
        tuple(row.step for row in rows),
        loads,
        _means([row.sent for row in rows]),
        _means([row.received for row in rows]),
        sum(row.forced_routing for row in rows),
    )


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of each column; of rows of the last one's length."""
    alike = [row for row in rows if len(row) == len(rows[-1])]
    return tuple(sum(column) / len(alike) for column in zip(*alike, strict=True))


def _multiples(counts: Sequence[float]) -> tuple[float, ...]:
    """Return counts as multiples of their mean."""
    whole = sum(counts) or 1.0
    return tuple(len(counts) * one / whole for one in counts)


@dataclass(frozen=True)
class _LoadRow:
    step: int
    tokens: Mapping[str, tuple[float, ...]]
    sent: tuple[float, ...] = ()
    received: tuple[float, ...] = ()
    forced_routing: bool = False


def _shape(row: _LoadRow) -> dict[str, int]:
    return {router: len(counts) for router, counts in row.tokens.items()}
