"""HTML documents, sections and tables, of which all of plait's pages are made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a page may load: nothing."""
_DOCUMENT = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$title</title>
<style>
$style</style>
</head>
<body>
$body<script type="application/json" id="data">$data</script>
$scripts
</body>
</html>
""")


def document(
    title: str, body: str, *, style: str, data: object, scripts: Iterable[str], policy: str = POLICY
) -> str:
    """Return a self-contained HTML document.

    `data`: what the scripts read as JSON from the element `data`; no text in it can end that element.
    `policy`: the content security policy of the page.
    """
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _DOCUMENT.substitute(
        title=escape(title),
        policy=policy,
        style=style,
        body=body,
        data=packed,
        scripts="\n".join(f"<script>\n{script}</script>" for script in scripts),
    )


def filled_template(path: str, **values: str) -> str:
    """Return a template file of `plait.pictures` as text, with the HTML `values` in place of its `$name`s."""
    return Template(page_file(path)).substitute(values)


def page_file(path: str) -> str:
    """Return the text of a file of `plait.pictures`, such as `report/page/report.css`."""
    return (resources.files("plait.pictures") / path).read_text(encoding="utf-8")


def figure(name: str, text: str, about: str | None = None) -> str:
    """Return a named number as an entry of an HTML list `dl`; `about`: text shown on hovering."""
    title = "" if about is None else f' title="{escape(about)}"'
    return f"<div{title}><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"


def wrappable(name: str) -> str:
    """Return a dotted name as HTML whose line may break after dots and underscores."""
    return re.sub(r"([._])", r"\1<wbr>", escape(name))


def section(title: str, body: str, about: str = "", name: str = "") -> str:
    """Return a section of a page as HTML; `about`: sentences below the title; `name`: the section's id."""
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
    """Return a bar as HTML: parts side by side, each with title, size and colour; `whole`: full size."""
    spans = "".join(
        f'<i title="{escape(title)}" '
        f'style="width: {100 * size / whole:.2f}%; background: var(--{colour})"></i>'
        for title, size, colour in parts
        if size > 0 and whole > 0
    )
    return f"<span class=share>{spans}</span>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend as HTML: name and colour of each entry."""
    items = "".join(
        f'<li><b class=mark style="background: var(--{colour})"></b>{escape(name)}</li>'
        for name, colour in entries
    )
    return f"<ul class=legend>{items}</ul>"


def _right(column: int, numbers: int) -> str:
    return " class=number" if column >= numbers else ""
