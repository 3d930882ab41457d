"""SVG: its elements, each written in one place, and pictures made of them, alone or within a page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from plait.pictures.colours import TEXT, TEXT_ON_CELL, TRACK

_STYLE = f"""\
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: {TEXT} }}
.title {{ font-size: 15px; font-weight: 600 }}
.cell {{ font-size: 11px; font-weight: 600; fill: {TEXT_ON_CELL}; text-anchor: middle; pointer-events: none }}
.small {{ font-size: 9px; font-weight: 500 }}
.stage {{ font-size: 9px; text-anchor: end }}
.time {{ font-size: 11px; text-anchor: middle }}
.track {{ fill: {TRACK}; fill-opacity: .13 }}
.grid {{ stroke: {TRACK}; stroke-opacity: .3 }}"""


def element(tag: str, inside: str = "", title: str = "", /, **attributes: str | float) -> str:
    """Return an SVG element around the SVG text `inside`; `title`: shown on hovering.

    Attributes are in pixels, rounded to hundredths, or text; those that are "" are left out. `class_` is
    written as `class`, and `_` within a name as `-`.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    content = f"<title>{escape(title)}</title>{inside}" if title else inside
    return f"<{tag}{given}>{content}</{tag}>" if content else f"<{tag}{given}/>"


def rect(
    x: float, y: float, width: float, height: float, title: str = "", /, **attributes: str | float
) -> str:
    """Return an SVG rectangle whose upper left corner is at `x`, `y`; `title`: shown on hovering."""
    return element("rect", "", title, **attributes, x=x, y=y, width=width, height=height)


def text_at(x: float, y: float, text: str, title: str = "", /, **attributes: str | float) -> str:
    """Return a line of SVG text at `x`, `y`: where its baseline begins, or as its class aligns it."""
    return element("text", escape(text), title, **attributes, x=x, y=y)


def path(line: str, **attributes: str | float) -> str:
    """Return an SVG path along `line`, which is in SVG's path commands."""
    return element("path", **attributes, d=line)


def inline_svg(name: str, width: float, height: float, elements: Iterable[str]) -> str:
    """Return an SVG element for an HTML page, whose styles apply; `name`: its accessible name."""
    box = f"0 0 {width:g} {height:g}"
    inside = "\n".join(["", *elements, ""])
    return element(
        "svg", inside, class_="plan", viewBox=box, width=width, height=height, role="img", aria_label=name
    )


def svg_document(name: str, width: int, height: int, elements: Iterable[str]) -> str:
    """Return a standalone SVG document of `elements`, with styles for the CSS classes of timelines.

    These are title, cell, small, stage, time, track and grid. `name`: its accessible name. `width`,
    `height`: in pixels.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(name)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        *elements,
        "</svg>\n",
    ]
    return "\n".join(lines)


def _attribute(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{round(value, 2):g}"
