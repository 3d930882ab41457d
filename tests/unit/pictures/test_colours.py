"""Colours can be told apart, also by people who see two of the three primary colours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest

from plait.pictures.colours import AXES, DARK_PAGE, LEGEND_SHADE, LIGHT_PAGE, USES, shade
from plait.schedules.action import Kind

SEEN = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Linear RGB as it is seen: Machado, Oliveira and Fernandes 2009, at full severity."""
LEAST = 9.0
"""Difference of two colours in CIE Lab; about 2 can just be noticed side by side."""


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (
        min(max(sum(weight * part for weight, part in zip(row, linear, strict=True)), 0), 1) for row in seen
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def series(page: Mapping[str, str]) -> dict[str, str]:
    return {name: colour for name, colour in page.items() if name.startswith("series-")}


PALETTES = {
    "kinds": {str(kind): shade(kind, LEGEND_SHADE) for kind in Kind},
    "axes": AXES,
    "uses": USES,
    "series, light": series(LIGHT_PAGE),
    "series, dark": series(DARK_PAGE),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("palette", PALETTES)
def test_colours_of_a_picture_differ_for_everyone(palette: str, seen: str) -> None:
    colours = {name: lab(colour, SEEN[seen]) for name, colour in PALETTES[palette].items()}
    for (one, first), (other, second) in combinations(colours.items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert distance >= LEAST, (one, other, distance)


@pytest.mark.parametrize("page", [LIGHT_PAGE, {**LIGHT_PAGE, **DARK_PAGE}], ids=["light", "dark"])
def test_text_and_curves_stand_out_from_the_page(page: Mapping[str, str]) -> None:
    ground = lab(page["page"], SEEN["all"])[0]
    for name in ("ink", "faint", *series(page)):
        assert abs(lab(page[name], SEEN["all"])[0] - ground) >= 40, name
