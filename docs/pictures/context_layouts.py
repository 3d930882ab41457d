"""Draws context-layouts.svg, for docs/guides/context-parallelism.md: which positions each rank holds.

Below the positions of each layout: which rank computes which pairs of causal attention, how many pairs, and
how many keys it receives.

.venv/bin/python docs/pictures/context_layouts.py
"""

from collections.abc import Iterator
from pathlib import Path

from plait.pictures.colours import rank_colour
from plait.pictures.svg_elements import svg_document
from plait.plan.layout.sequence_layout import SequenceLayout, sequence_layout
from plait.tensor.attention.key_exchange_plan import Mask, build_plan

FOLDER = Path(__file__).parent
LENGTH, RANKS = 16, 4
CELL, LANE, GAP = 14, 15, 44
"""Pixels: a position; a rank's lane; between two layouts."""
LEFT, TOP, SIDE = 66, 68, CELL * LENGTH
BAR = 2.6
"""Pixels for a pair."""


def panel(kind: str, layout: SequenceLayout, x: float) -> Iterator[str]:
    """Yield the elements of one layout: its name, positions by rank, pairs by query, and their numbers."""
    yield f'<text class="title" x="{x}" y="{TOP - 12}">{kind}</text>'
    matrix, bars = TOP + RANKS * LANE + 26, TOP + RANKS * LANE + 26 + SIDE + 26
    yield f'<rect class="track" x="{x}" y="{matrix}" width="{SIDE - 1}" height="{SIDE - 1}"/>'
    yield f'<text x="{x}" y="{bars - 7}">query-key pairs</text>'
    yield f'<text text-anchor="end" x="{x + SIDE}" y="{bars - 7}">keys received</text>'
    for rank in range(RANKS):
        lane, bar = TOP + rank * LANE, bars + rank * LANE
        colour, held = rank_colour(rank), layout.positions(rank).tolist()
        yield f'<rect class="track" x="{x}" y="{lane}" width="{SIDE}" height="{LANE - 2}" rx="3"/>'
        for position in held:
            at = x + position * CELL
            yield cell(at, lane, CELL - 1, LANE - 2, colour, f"position {position}: rank {rank}")
            yield f'<text class="cell small" x="{at + CELL / 2 - 0.5}" y="{lane + 9.5}">{position}</text>'
            for key in range(position + 1):
                about = f"query {position}, key {key}: rank {rank}"
                yield cell(x + key * CELL, matrix + position * CELL, CELL - 1, CELL - 1, colour, about)
        pairs = sum(position + 1 for position in held)
        yield cell(x, bar, BAR * pairs, LANE - 2, colour, f"rank {rank}: {pairs} pairs")
        yield f'<text x="{x + BAR * pairs + 5:g}" y="{bar + 11}">{pairs}</text>'
        received = sum(build_plan(layout, rank, Mask()).received(1))
        yield f'<text text-anchor="end" x="{x + SIDE}" y="{bar + 11}">{received}</text>'


def cell(x: float, y: float, width: float, height: float, colour: str, about: str) -> str:
    """Return a rectangle with a tooltip."""
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
    return f'<rect {shape} fill="{colour}"><title>{about}</title></rect>'


def labels() -> Iterator[str]:
    """Yield the title and the labels on the left."""
    title = f"Causal attention to {LENGTH} positions on {RANKS} ranks: who holds and computes what"
    yield f'<text class="title" x="12" y="25">{title}</text>'
    matrix = TOP + RANKS * LANE + 26
    for rank in range(RANKS):
        for top in (TOP, matrix + SIDE + 26):
            yield f'<text x="12" y="{top + rank * LANE + 11}">rank {rank}</text>'
    yield f'<text x="{LEFT}" y="{matrix - 7}">keys →</text>'
    yield f'<text x="12" y="{matrix + 11}">queries</text><text x="12" y="{matrix + 27}">↓</text>'


if __name__ == "__main__":
    elements = list(labels())
    for number, kind in enumerate(("zigzag", "striped", "contiguous")):
        layout = sequence_layout(LENGTH, RANKS, kind)
        elements += panel(kind, layout, LEFT + number * (SIDE + GAP))
    height, width = TOP + 2 * RANKS * LANE + 52 + SIDE + 14, LEFT + 3 * (SIDE + GAP) - GAP + 12
    picture = svg_document("Layouts of context parallelism", width, height, elements)
    (FOLDER / "context-layouts.svg").write_text(picture, encoding="utf-8")
