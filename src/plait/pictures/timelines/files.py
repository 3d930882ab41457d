"""Writing of a timeline to files of several formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from plait.errors import ConfigError
from plait.pictures.timelines.chrome_trace import draw_trace
from plait.pictures.timelines.html import draw_html
from plait.pictures.timelines.svg import draw_svg
from plait.pictures.timelines.timeline import Timeline
from plait.schedules.torch_csv import to_csv

FORMATS = ("svg", "html", "trace", "csv")


def write_pictures(
    timeline: Timeline, paths: Mapping[str, Path], *, name: str | None = None
) -> Iterator[Path]:
    """Write `timeline` to each of `paths` in the format that is its key; yield each path once it is written.

    `name` is the title, by default the schedule's. Raises ConfigError for a file that cannot be written.
    """
    for kind, path in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(picture(timeline, kind, name=name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): give another file.") from None
        yield path


def picture(timeline: Timeline, kind: str, *, name: str | None = None) -> str:
    """Return `timeline` in one of `FORMATS`: SVG, HTML, Chrome trace, or the schedule as PyTorch's CSV."""
    if kind == "csv":
        return to_csv(timeline.schedule)
    draw = {"svg": draw_svg, "html": draw_html, "trace": draw_trace}[kind]
    return draw(timeline, name=name)
