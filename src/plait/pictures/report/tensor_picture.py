"""Pictures of parameters as SVG, with the piece of each rank of `tp`, `shard` and `cp`; the same in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import prod

from plait.pictures.colours import rank_colour
from plait.pictures.markup import svg
from plait.pictures.report.run_description import PlannedTensor, RunDescription, TensorPiece

_MOST_LINES = 48
"""Intervals of a piece that are told apart by lines."""
_FIRST_HUE = 2
"""The colour of the first rank of `tp`; those before are of the first ranks of `pp`."""
_MATRIX = 190
"""Longest side of a matrix, in pixels."""


def tensor_picture(tensor: PlannedTensor, mesh: Mapping[str, int]) -> str:
    """Return a tensor with its pieces: colours tell the ranks of `tp`, lines those of `shard` and `cp`."""
    rows, columns = _as_matrix(tensor.shape)
    scale = _MATRIX / max(rows, columns, 1)
    wide, high = max(columns * scale, 18), max(rows * scale, 18)
    elements = []
    for tp, piece in enumerate(tensor.pieces):
        for offsets, sizes in piece.boxes:
            x, y, w, h = _box(offsets, sizes, wide, high, (rows, columns))
            told = f"{tensor.name}: {_ranges(offsets, sizes)}, of tp {tp}"
            whole = all(size == full for size, full in zip(sizes, tensor.shape, strict=True))
            name = "every rank of tp" if whole and len(tensor.pieces) > 1 else told
            owner, hue = ("all", _FIRST_HUE) if whole else (str(tp), _FIRST_HUE + tp)
            elements.append(
                f'<rect class="piece" data-tp="{owner}" {_place(x, y, w, h)} fill="{rank_colour(hue)}">'
                f"<title>{escape(name)}</title></rect>"
            )
            elements += _intervals(piece, x, y, w, h, owner, mesh, coloured=len(tensor.pieces) == 1)
            base = y + 12 if piece.intervals else y + h / 2 + 4
            if not whole and w > 30 and h > (30 if piece.intervals else 13):
                elements.append(f'<text class="on" x="{x + w / 2:.1f}" y="{base:.1f}">tp {tp}</text>')
        if piece.boxes and all(sizes == tensor.shape for _, sizes in piece.boxes):
            break
    return svg(tensor.name, round(wide) + 2, round(high) + 2, elements)


def tensor_text(tensor: PlannedTensor, about: RunDescription) -> str:
    """Return in words how a tensor is divided: its shape, along which axes, and how much a rank has."""
    shape = " × ".join(f"{size:,}" for size in tensor.shape)
    piece = tensor.pieces[0]
    own = sum(prod(sizes) for _, sizes in piece.boxes)
    parts = []
    if own < prod(tensor.shape):
        parts.append(f"tp {len(tensor.pieces)}")
    if piece.intervals:
        own = max(stop - start for start, stop in piece.intervals)
        parts += [f"{axis} {about.mesh[axis]}" for axis in ("shard", "cp") if about.mesh[axis] > 1]
    divided = (
        f"divided over {' × '.join(parts)}: at most {own:,} elements a rank"
        if parts
        else "whole on each rank"
    )
    alike = f"; {tensor.alike - 1} more like it" if tensor.alike > 1 else ""
    on = f"pp {', '.join(map(str, tensor.pp))}" if about.mesh["pp"] > 1 else ""
    return f"{shape}, {divided}{'; on ' if on else ''}{on}{alike}"


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns as which a tensor is drawn; a vector is one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def _box(
    offsets: Sequence[int], sizes: Sequence[int], wide: float, high: float, matrix: tuple[int, int]
) -> tuple[float, float, float, float]:
    rows, columns = max(matrix[0], 1), max(matrix[1], 1)
    if len(sizes) < 2:
        first, count = (offsets[0], sizes[0]) if sizes else (0, 1)
        return 1 + first / columns * wide, 1, count / columns * wide, high
    rest = prod(sizes[2:])
    x, breadth = offsets[1] * rest / columns * wide, sizes[1] * rest / columns * wide
    return 1 + x, 1 + offsets[0] / rows * high, breadth, sizes[0] / rows * high


def _intervals(
    piece: TensorPiece,
    x: float,
    y: float,
    w: float,
    h: float,
    tp: str,
    mesh: Mapping[str, int],
    *,
    coloured: bool,
) -> Iterator[str]:
    """Yield a rectangle for each interval of a piece's elements, row after row from top to bottom."""
    if len(piece.boxes) != 1 or not piece.intervals:
        return
    fine = " fine" if len(piece.intervals) > _MOST_LINES else ""
    total = max(prod(piece.boxes[0][1]), 1)
    row = len(piece.boxes[0][1]) < 2
    for number, (start, stop) in enumerate(piece.intervals):
        shard, cp = divmod(number, mesh["cp"])
        owner = f"shard {shard}" + (f", cp {cp}" if mesh["cp"] > 1 else "")
        told = f"elements {start:,} to {stop:,} of the piece: tp {tp}, {owner}"
        style = f' style="--own: {rank_colour(_FIRST_HUE + number)}"' if coloured else ""
        left, top, wide, high = _part(x, y, w, h, start / total, stop / total, row=row)
        yield (
            f'<rect{style} class="interval{fine}" data-tp="{tp}" data-shard="{shard}" data-cp="{cp}" '
            f"{_place(left, top, wide, high)}><title>{escape(told)}</title></rect>"
        )
        if coloured and wide > 6.2 * len(owner) and high > 13:
            yield f'<text class="on" x="{left + wide / 2:.1f}" y="{top + high / 2 + 4:.1f}">{owner}</text>'


def _ranges(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return " × ".join(f"{first:,} to {first + size:,}" for first, size in zip(offsets, sizes, strict=True))


def _part(
    x: float, y: float, w: float, h: float, start: float, stop: float, *, row: bool
) -> tuple[float, float, float, float]:
    """Return the part from `start` to `stop` of a rectangle, along its row or downwards."""
    if row:
        return x + w * start, y, w * (stop - start), h
    return x, y + h * start, w, h * (stop - start)


def _place(x: float, y: float, w: float, h: float) -> str:
    return f'x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}"'
