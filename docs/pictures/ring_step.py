"""Draws ring-step.svg, for docs/guides/context-parallelism.md: attention of one layer on three ranks.

The order of what is computed and sent is that of `tensor/attention/ring.py`; pairs and messages are counted
by the exchange plans of a zigzag layout. Times are not measured: see `Costs`.

.venv/bin/python docs/pictures/ring_step.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from plait.pictures.colours import LEGEND_SHADE, TRACK, shade
from plait.pictures.svg_elements import svg_document
from plait.plan.layout.sequence_layout import sequence_layout
from plait.schedules.action import Kind
from plait.tensor.attention.key_exchange_plan import ExchangePlan, Mask, build_plan

FOLDER = Path(__file__).parent
RANKS, CHUNK = 3, 64
"""Ranks; positions in one of the two chunks of a rank."""
LEFT, TOP, WIDTH, ROW, LANE, HEAD = 62, 72, 860, 42, 20, 34
"""Pixels: where times begin; above all; of the picture; of a rank, and of its computing; above a pass."""
NARROW = 24
"""Cells narrower than this have the small font."""
NOTES = (
    "Q, K, V, O: projections of queries, keys, values, outputs",
    "own keys, keys of 1: attention to this rank's keys, to those of rank 1",
    "dK, dV: gradients of keys and values, returned to their ranks",
)


@dataclass(frozen=True)
class Costs:
    """Times of what a rank does: 4 query heads a key head, and as many positions in a chunk as features."""

    query: float = 1.0
    """Projection of queries, or of outputs; as much for the gradient of its input, or of its weight."""
    keys: float = 0.5
    """The same of keys and values together."""
    block: float = 1.0
    """Attention of a chunk's queries to all keys of another chunk."""
    backward: float = 2.5
    """Times as much for the gradients of a block."""
    message: float = 0.5
    """To send the keys and values of a chunk, or their gradients."""


class Cell(NamedTuple):
    """What a rank computes or sends, from when to when."""

    text: str
    kind: Kind
    start: float
    end: float
    sent: bool = False


COSTS = Costs()
PLANS = [
    build_plan(sequence_layout(2 * CHUNK * RANKS, RANKS, "zigzag"), rank, Mask()) for rank in range(RANKS)
]


def pairs(plan: ExchangePlan, peer: int) -> float:
    """Return how many pairs of chunks a rank computes on another rank's keys, or on its own."""
    block = plan.peers[peer]
    area = 0.0
    for call in plan.own if block is None else block.calls:
        size = (call.query.stop - call.query.start) * (call.key.stop - call.key.start)
        area += size / 2 if call.mask == "causal" else size
    return area / CHUNK**2


def message(plan: ExchangePlan) -> float:
    """Return how long a rank sends and receives keys and values, or their gradients."""
    return COSTS.message * max(sum(plan.sent(1)), sum(plan.received(1))) / CHUNK


class Pass:
    """The cells of one rank in a pass, one after another."""

    def __init__(self, plan: ExchangePlan) -> None:
        self.plan, self.cells, self.now = plan, list[Cell](), 0.0
        self.others = [peer for peer in range(RANKS) if peer != plan.index]

    def compute(self, text: str, kind: Kind, cost: float) -> None:
        """Append a cell of a duration."""
        self.cells.append(Cell(text, kind, self.now, self.now + cost))
        self.now += cost

    def block(self, peer: int, kind: Kind) -> None:
        """Append attention to the keys of a rank."""
        text = "own keys" if peer == self.plan.index else f"keys of {peer}"
        factor = COSTS.backward if kind is Kind.I else 1.0
        self.compute(text, kind, factor * COSTS.block * pairs(self.plan, peer))

    def send(self, text: str, kind: Kind) -> float:
        """Append a message; return when it has arrived."""
        arrived = self.now + message(self.plan)
        self.cells.append(Cell(text, kind, self.now, arrived, sent=True))
        return arrived

    def wait(self, arrived: float) -> None:
        """Let the next cell begin no earlier than a message arrives."""
        self.now = max(self.now, arrived)


def forward(plan: ExchangePlan) -> Pass:
    """Return the forward of a rank."""
    one = Pass(plan)
    one.compute("KV", Kind.F, COSTS.keys)
    arrived = one.send("K, V", Kind.F)
    one.compute("Q", Kind.F, COSTS.query)
    one.block(plan.index, Kind.F)
    one.wait(arrived)
    for peer in one.others:
        one.block(peer, Kind.F)
    one.compute("O", Kind.F, COSTS.query)
    return one


def backward(plan: ExchangePlan, *, keeps: bool) -> Pass:
    """Return the backward of a rank, which has kept the other ranks' keys, or has them sent again."""
    one = Pass(plan)
    one.compute("O", Kind.I, COSTS.query)
    if not keeps:
        arrived = one.send("K, V", Kind.F)
        one.compute("O", Kind.W, COSTS.query)
        one.block(plan.index, Kind.I)
        one.wait(arrived)
    for peer in one.others:
        one.block(peer, Kind.I)
    arrived = one.send("dK, dV", Kind.I)
    if keeps:
        one.compute("O", Kind.W, COSTS.query)
        one.block(plan.index, Kind.I)
    one.compute("Q", Kind.I, COSTS.query)
    one.compute("Q", Kind.W, COSTS.query)
    one.wait(arrived)
    one.compute("KV", Kind.I, COSTS.keys)
    one.compute("KV", Kind.W, COSTS.keys)
    return one


def rows(passes: Sequence[Pass], name: str, top: float, scale: float) -> Iterator[str]:
    """Yield the elements of a pass: its name, and for each rank what it computes and sends."""
    yield f'<text x="{LEFT}" y="{top - 8}">{name}</text>'
    for number, one in enumerate(passes):
        y = top + number * ROW
        yield f'<text x="12" y="{y + 14}">rank {number}</text>'
        end = max(cell.end for cell in one.cells)
        yield f'<rect class="track" x="{LEFT}" y="{y}" width="{end * scale:.1f}" height="{LANE}" rx="4"/>'
        for text, kind, start, stop, sent in one.cells:
            x, wide, height = LEFT + start * scale, (stop - start) * scale - 1.5, 12 if sent else LANE
            low = y + LANE + 2 if sent else y
            shape = f'x="{x:.1f}" y="{low}" width="{wide:.1f}" height="{height}" rx="3"'
            outline = f' stroke="{shade(kind, LEGEND_SHADE)}"' if sent else ""
            fill = TRACK if sent else shade(kind, LEGEND_SHADE)
            opacity = ' fill-opacity=".25"' if sent else ""
            yield f'<rect {shape} fill="{fill}"{opacity}{outline}/>'
            font = "cell small" if wide < NARROW else "cell"
            style = 'text-anchor="middle" style="font-size: 10px"' if sent else f'class="{font}"'
            yield f'<text {style} x="{x + wide / 2:.1f}" y="{low + (9.5 if sent else 14)}">{text}</text>'


def legend(y: float) -> Iterator[str]:
    """Yield the legend."""
    x = 12.0
    for kind, text in (
        (Kind.F, "forward"),
        (Kind.I, "gradients of inputs"),
        (Kind.W, "gradients of weights"),
        (None, "sent meanwhile"),
    ):
        fill = (
            f'fill="{shade(kind, LEGEND_SHADE)}"'
            if kind
            else f'fill="{TRACK}" fill-opacity=".25" stroke="{TRACK}"'
        )
        yield f'<rect x="{x:g}" y="{y - 12:g}" width="19" height="16" rx="4" {fill}/>'
        yield f'<text x="{x + 25:g}" y="{y:g}">{text}</text>'
        x += 25 + 6.6 * len(text) + 18
    for line, text in enumerate(NOTES):
        yield f'<text x="{WIDTH - 12}" y="{TOP + 40 + 20 * line}" text-anchor="end">{text}</text>'


if __name__ == "__main__":
    passes = {
        "forward": [forward(plan) for plan in PLANS],
        "backward, keys sent again": [backward(plan, keeps=False) for plan in PLANS],
        'backward, keys kept (sequence_parallel="keep")': [backward(plan, keeps=True) for plan in PLANS],
    }
    longest = max(one.now for every in passes.values() for one in every)
    name = f"Attention of one layer on {RANKS} ranks, zigzag: what is computed, and what travels meanwhile"
    elements = [f'<text class="title" x="12" y="25">{name}</text>', *legend(50)]
    top = TOP + HEAD - 16
    for title, every in passes.items():
        elements += rows(every, title, top, (WIDTH - LEFT - 12) / longest)
        top += RANKS * ROW + HEAD
    picture = svg_document(name, WIDTH, top - HEAD, elements)
    (FOLDER / "ring-step.svg").write_text(picture, encoding="utf-8")
