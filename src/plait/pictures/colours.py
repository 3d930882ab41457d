"""Colours of all pictures: one hue per kind of action, and greys legible on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Mapping
from colorsys import hls_to_rgb

from plait.schedules.action import Kind

_HUES = {Kind.F: (213, 88), Kind.B: (27, 92), Kind.I: (338, 78), Kind.W: (156, 52)}
"""Hue and saturation of each kind; lightness grows from the first micro-batch to the last."""
_LIGHTNESS = 58, 78
LEGEND_SHADE = 0.3
"""The `shade` of a kind in legends, and where micro-batches have one colour."""

TEXT_ON_CELL = "#0b1526"
"""Colour of text on a cell."""
TEXT, TRACK = "#76808c", "#8a94a0"
"""Colours of an SVG, whose page may be light or dark: text; tracks and grid lines, with some opacity."""

AXES = {
    "axis-pp": "#4477aa",
    "axis-tp": "#aa3377",
    "axis-cp": "#ccbb44",
    "axis-ep": "#66ccee",
    "axis-dp": "#228833",
    "axis-tie": "#ee6677",
    "axis-all": "#8a94a0",
}
"""Colours of the axes of a mesh along which ranks communicate: of Paul Tol's bright scheme."""
USES = {
    "parameters": "#4477aa",
    "gathered": "#ee6677",
    "gradients": "#228833",
    "optimizer": "#ccbb44",
    "activations": "#66ccee",
    "messages": "#aa3377",
    "batch": "#8a94a0",
}
"""Colours of uses of memory, of the same scheme: told apart without red or without green too."""

LIGHT_PAGE: Mapping[str, str] = {
    "page": "#ffffff",
    "ink": "#1c2530",
    "faint": "#66707c",
    "track": "#8a94a022",
    "grid": "#8a94a04d",
    "held": "#7a8fb04d",
    "edge": "#5d7599",
    "card": "#ffffff",
    "rim": "#8a94a066",
    "on-cell": TEXT_ON_CELL,
    "warning": "#fff1d6",
    "bar": "#4477aa",
    "computing": "#66ccee",
    "series-0": "#0072b2",
    "series-1": "#d55e00",
    "series-2": "#008763",
    "series-3": "#4b1d6b",
    "series-line": "#66707c",
    **AXES,
    **{f"use-{name}": colour for name, colour in USES.items()},
}
"""Colours of the HTML page, by the names in its style sheet."""
DARK_PAGE: Mapping[str, str] = {
    "page": "#12171e",
    "ink": "#e4e9ef",
    "faint": "#939daa",
    "track": "#8a94a026",
    "grid": "#8a94a040",
    "held": "#8fa6c93d",
    "edge": "#8fa6c9",
    "card": "#1d2530",
    "warning": "#43340f",
    "series-0": "#56b4e9",
    "series-1": "#f08a4b",
    "series-2": "#2fc39a",
    "series-3": "#f0e07a",
    "series-line": "#939daa",
}

_CHOSEN_SERIES = 4
_GOLDEN_ANGLE = 0.381966
"""Of a turn."""

TERMINAL = {Kind.F: (111, 75), Kind.B: (215, 209), Kind.I: (218, 175), Kind.W: (157, 114)}
"""Backgrounds, of a terminal's 256 colours, for even and odd micro-batches."""


def shade(kind: Kind, part: float) -> str:
    """Return the colour of an action as `#rrggbb`, by its kind and `part` (0: first micro-batch, 1: last)."""
    (hue, saturation), (low, high) = _HUES[kind], _LIGHTNESS
    lightness = low + part * (high - low)
    red, green, blue = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def rank_colour(rank: int) -> str:
    """Return the colour of a rank as `#rrggbb`: four hues, then lighter ones, which repeat after sixteen."""
    hues = list(_HUES)
    return shade(hues[rank % len(hues)], rank // len(hues) % 4 / 3)


def page_colours(series: int = 0) -> str:
    """Return the CSS variables of the HTML page, for light and dark, with colours of at least four series."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in {**colours, **more}.items())
        for colours, more in (
            (LIGHT_PAGE, _further_series(series, lightness=0.38)),
            (DARK_PAGE, _further_series(series, lightness=0.7)),
        )
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


def _further_series(series: int, lightness: float) -> dict[str, str]:
    """Return the colours of series beyond the first four, a golden angle apart, by their variable."""
    found = {}
    for number in range(_CHOSEN_SERIES, series):
        parts = hls_to_rgb(number * _GOLDEN_ANGLE % 1, lightness, 0.62)
        found[f"series-{number}"] = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return found
