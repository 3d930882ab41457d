"""A picture of points: where they are, and which are drawn."""

from __future__ import annotations

import re

import pytest

from plait.pictures.report.scatter_picture import ScatterPicture, ScatterPoint


def _centres(picture: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)
    return [(float(x), float(y)) for x, y in found]


def test_scatter_points_are_on_scale_and_the_first_is_drawn_last() -> None:
    points = [
        ScatterPoint(x, y, "series-0", f"<{x}>", "a & b" * (x == 10)) for x, y in ((10, 1), (20, 3), (40, 2))
    ]
    picture = ScatterPicture("GiB", "s", points, [(40, 1), (10, 3)], (50, "limit")).draw("name")
    (x2, y2), (x1, y1), (x0, y0) = _centres(picture)
    assert abs((x2 - x0) - 3 * (x1 - x0)) < 0.3
    assert y1 < y2 < y0
    assert abs((y0 - y1) - 2 * (y0 - y2)) < 0.3
    assert "&lt;10&gt;" in picture
    assert "a &amp; b" in picture
    line = re.search(r'class="frontier" d="M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)"', picture)
    assert line is not None
    assert [float(one) for one in line.groups()] == pytest.approx([x0, y1, x2, y0], abs=0.06)
    limit = re.search(r'class="limit" d="M([\d.]+) ', picture)
    assert limit is not None
    assert float(limit[1]) > x2


def test_points_at_one_place_are_drawn_once_and_counted() -> None:
    same = [ScatterPoint(5, 2, "series-0", name) for name in ("first", "second", "third")]
    picture = ScatterPicture("GiB", "s", [*same, ScatterPoint(5, 2, "series-1", "other")]).draw("name")
    assert len(_centres(picture)) == 2
    assert "<title>first\nand 2 more here</title>" in picture
    assert "<title>other</title>" in picture
