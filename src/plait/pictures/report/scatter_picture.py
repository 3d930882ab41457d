"""A picture of points: two figures of each, a line through some of them, and a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.pictures.quantities import number_text, round_numbers
from plait.pictures.svg_elements import element, inline_svg, path, text_at

_WIDTH, _HEIGHT = 860, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 26, 24, 46
_TICKS = 8
_NEAR = 3
"""Pixels within which points are at one place."""


@dataclass(frozen=True)
class ScatterPoint:
    """A point with its colour, a text shown on hovering, and a `label` beside it."""

    x: float
    y: float
    colour: str
    title: str
    label: str = ""


@dataclass(frozen=True)
class ScatterPicture:
    """A scatter plot on two axes, each with name and unit: `across` from 0, `up` around the values."""

    across: str
    up: str
    points: Sequence[ScatterPoint]
    """The first is drawn over the others; of those at one place with one colour, only the first is drawn."""
    line: Sequence[tuple[float, float]] = ()
    """Points that a line joins by steps: from each to the right until the next one's x."""
    limit: tuple[float, str] | None = None
    """The x of a vertical line, and its label."""

    def draw(self, name: str) -> str:
        """Return the picture as an SVG element; `name` is its accessible name."""
        places: dict[tuple[int, int, str], list[ScatterPoint]] = {}
        for point in self.points:
            place = round(self._x(point.x) / _NEAR), round(self._y(point.y) / _NEAR), point.colour
            places.setdefault(place, []).append(point)
        points = [self._point(*at) for at in places.values()]
        return inline_svg(name, _WIDTH, _HEIGHT, [*self._axes(), *self._lines(), *reversed(points)])

    @property
    def _right(self) -> float:
        ends = [point.x for point in self.points] + ([self.limit[0]] if self.limit else [])
        return 1.04 * max(ends)

    @property
    def _range(self) -> tuple[float, float]:
        values = [point.y for point in self.points]
        margin = 0.08 * (max(values) - min(values) or max(values))
        return min(values) - margin, max(values) + margin

    def _x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self._right

    def _y(self, value: float) -> float:
        low, high = self._range
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (value - low) / (high - low)

    def _axes(self) -> Iterator[str]:
        floor_y, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for value in round_numbers(*self._range, _TICKS):
            y = self._y(value)
            yield path(f"M{_LEFT} {y:.1f}H{right}", class_="rule")
            yield _text(_LEFT - 8, y + 4, number_text(value), "end")
        for value in round_numbers(0, self._right, _TICKS):
            x = self._x(value)
            yield path(f"M{x:.1f} {_TOP}V{floor_y}", class_="rule")
            yield _text(x, floor_y + 16, number_text(value), "middle")
        yield _text(right, _HEIGHT - 8, self.across, "end")
        yield _text(8, 14, self.up, "start")

    def _lines(self) -> Iterator[str]:
        if self.limit is not None:
            x = self._x(self.limit[0])
            yield path(f"M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}", class_="limit")
            yield _text(x, _TOP - 8, self.limit[1], "end")
        if self.line:
            (x, y), *others = sorted(self.line)
            steps = "".join(f"H{self._x(x):.1f}V{self._y(y):.1f}" for x, y in others)
            yield path(f"M{self._x(x):.1f} {self._y(y):.1f}{steps}", class_="frontier")

    def _point(self, point: ScatterPoint, *hidden: ScatterPoint) -> str:
        """Return a point; its hover text counts the points that it hides."""
        x, y = self._x(point.x), self._y(point.y)
        inside = element("circle", cx=x, cy=y, r=5.5, fill=f"var(--{point.colour})")
        if point.label:
            ring = element("circle", class_="ring", cx=x, cy=y, r=10)
            inside = ring + inside + text_at(x, y - 15, point.label, text_anchor="middle")
        title = point.title + (f"\nand {len(hidden)} more here" if hidden else "")
        return element("g", inside, title, class_="point", tabindex="0")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return text_at(x, y, text, class_="head", text_anchor=anchor)
