"""HTML of sections and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape


def wrappable(name: str) -> str:
    """Return a dotted name as HTML whose line may break after dots and underscores."""
    return re.sub(r"([._])", r"\1<wbr>", escape(name))


def section(title: str, body: str, about: str = "", name: str = "") -> str:
    """Return a section of the page; `about`: sentences below its title, as HTML; `name`: its id."""
    told = f"<p class=about>{about}</p>" if about else ""
    return f'<section id="{name or title.lower()}"><h2>{escape(title)}</h2>{told}\n{body}</section>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Iterable[int] = (), numbers: int = 10**9
) -> str:
    """Return a table of HTML cells; rows `marked` stand out; columns from `numbers` on are numbers."""
    out, dark = [], set(marked)
    for number, row in enumerate(rows):
        cells = "".join(f"<td{_right(column, numbers)}>{text}</td>" for column, text in enumerate(row))
        out.append(f"<tr{' class=differs' if number in dark else ''}>{cells}</tr>")
    heads = "".join(f"<th{_right(column, numbers)}>{escape(name)}</th>" for column, name in enumerate(head))
    return f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{chr(10).join(out)}</tbody></table>"


def bar(parts: Iterable[tuple[str, float, str]], whole: float) -> str:
    """Return a bar of parts side by side, each with its title, size and colour, of the width of `whole`."""
    pieces = "".join(
        f'<i title="{escape(title)}" '
        f'style="width: {100 * size / whole:.2f}%; background: var(--{colour})"></i>'
        for title, size, colour in parts
        if size > 0 and whole > 0
    )
    return f"<span class=share>{pieces}</span>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend: name and colour of each entry."""
    items = "".join(
        f'<li><b class=mark style="background: var(--{colour})"></b>{escape(name)}</li>'
        for name, colour in entries
    )
    return f"<ul class=legend>{items}</ul>"


def _right(column: int, numbers: int) -> str:
    return " class=number" if column >= numbers else ""


def svg(name: str, width: float, height: float, elements: Sequence[str]) -> str:
    """Return an SVG element; `name` is its accessible name, `width` and `height` are in pixels."""
    return (
        f'<svg class="plan" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label="{escape(name)}">\n' + "\n".join(elements) + "\n</svg>"
    )
