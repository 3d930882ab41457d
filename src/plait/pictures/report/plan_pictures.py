"""Pictures of a plan as SVG: which rank runs which layers, and which part of a parameter it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from plait.pictures.colours import rank_colour
from plait.pictures.report.run_json import PlannedTensor, RunDescription, TensorShard
from plait.pictures.svg_elements import inline_svg, rect, text_at

Area = tuple[float, float, float, float]
"""Left and upper edge, width and height of a rectangle, in pixels."""
WIDTH = 1150
_LABEL = 300
"""Pixels for the layers of a rank of `pp`."""
_MOST_LETTERS = 44
"""Of the text on them."""
_CELL, _SMALLEST = 54, 3
"""Widest and narrowest cell of a rank, in pixels."""
_ROW = 30
_NUMBERED = 22
"""Pixels from which a cell has its rank's number."""
_MOST_LINES = 48
"""Intervals of a shard that are told apart by lines."""
_FIRST_HUE = 2
"""The colour of the first rank of `tp`; those before are of the first ranks of `pp`."""
_MATRIX = 190
"""Longest side of a matrix, in pixels."""


def ranks_picture(about: RunDescription) -> str:
    """Return a grid of ranks as SVG: a row per `pp` rank with its layers, columns for the other axes."""
    columns = about.world // about.mesh["pp"]
    gaps = _gaps(about.mesh)
    cell = max(_SMALLEST, min(_CELL, (WIDTH - _LABEL - sum(gaps)) / columns))
    top = 22 if about.mesh["replicate"] * about.mesh["shard"] > 1 else 2
    row = _ROW if about.mesh["pp"] <= 24 else max(12, 720 / about.mesh["pp"])
    elements = [*_column_heads(about.mesh, cell, gaps)]
    for pp in range(about.mesh["pp"]):
        y = top + pp * row
        text = _layers_text(about, pp)
        text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
        elements.append(text_at(0, y + row / 2 + 1, text, _layers_list(about, pp)))
        elements += _row_of_ranks(about, pp, y, row, cell, gaps)
    height = top + about.mesh["pp"] * row + 4
    return inline_svg("Ranks and their layers", WIDTH, height, elements)


def layers_picture(about: RunDescription) -> str:
    """Return the layers in order as SVG, as wide as their parameters, coloured by `pp` rank."""
    total = sum(layer.elements for layer in about.layers) or 1
    least = min(6.0, WIDTH / len(about.layers))
    room = WIDTH - least * len(about.layers)
    x, elements = 0.0, []
    for layer in about.layers:
        wide = least + room * layer.elements / total
        rank = about.stage_ranks[layer.stage]
        told = f"{layer.path or layer.module}: stage {layer.stage}, pp {rank}, {layer.elements:,} elements"
        elements.append(rect(x, 0, max(wide - 1.5, 0.5), 26, told, rx=3, fill=rank_colour(rank)))
        if label := _fitting(layer.path or layer.module, wide):
            elements.append(text_at(x + wide / 2, 17, label, class_="on"))
        x += wide
    return inline_svg("Layers, in order", WIDTH, 28, elements)


def _fitting(path: str, wide: float) -> str:
    """Return the longest end of a dotted path that fits into `wide` pixels, or ""."""
    names = path.split(".")
    ends = (".".join(names[first:]) for first in range(len(names)))
    return next((end for end in ends if wide > 6.4 * len(end) + 6), "")


def _gaps(mesh: Mapping[str, int]) -> list[float]:
    """Return the space before each column: more where an outer axis begins anew."""
    cp, tp = mesh["cp"], mesh["tp"]
    columns = prod(mesh.values()) // mesh["pp"]
    unit = 6.0 if columns <= 64 else 2.0
    gaps = [0.0]
    for column in range(1, columns):
        level = [tp, tp * cp, tp * cp * mesh["shard"]]
        starts = sum(column % size == 0 for size in level)
        gaps.append(unit * starts / 1.5 if tp * cp < columns or cp > 1 else 0.0)
    return gaps


def _positions(cell: float, gaps: Sequence[float]) -> list[float]:
    """Return the x coordinate at which each column of ranks begins; `gaps`: before each column."""
    return [_LABEL + number * cell + gap for number, gap in enumerate(accumulate(gaps))]


def _column_heads(mesh: Mapping[str, int], cell: float, gaps: Sequence[float]) -> Iterator[str]:
    """Yield a label above the first column of each data-parallel rank, where there is room."""
    each, x = mesh["cp"] * mesh["tp"], _positions(cell, gaps)
    last = -100.0
    if mesh["replicate"] * mesh["shard"] == 1:
        return
    for column in range(0, len(x), each):
        text = f"dp {column // each}"
        if x[column] - last > 6.6 * len(text) + 6:
            last = x[column]
            yield text_at(x[column], 12, text, class_="head")


def _row_of_ranks(
    about: RunDescription, pp: int, y: float, row: float, cell: float, gaps: Sequence[float]
) -> Iterator[str]:
    mesh, columns = about.mesh, len(gaps)
    wide, round_by = (cell - 2, 3) if cell > 8 else (max(cell - 0.6, 1), 0)
    for column, x in enumerate(_positions(cell, gaps)):
        rank = pp * columns + column
        place = _place(rank, mesh)
        where = ", ".join(f"{axis} {index}" for axis, index in place.items() if mesh[axis] > 1) or "alone"
        told, data = f"rank {rank}: {where}", {f"data_{axis}": str(index) for axis, index in place.items()}
        look = {"class_": "rank", "rx": f"{round_by}", "fill": rank_colour(pp)}
        yield rect(x, y, wide, row - 4, told, **look, data_rank=str(rank), **data)
        if cell >= _NUMBERED and row >= 14:
            yield text_at(x + cell / 2 - 1, y + row / 2 + 2, str(rank), class_="on")


def _place(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    place = {}
    for axis in reversed(tuple(mesh)):
        rank, place[axis] = divmod(rank, mesh[axis])
    return {axis: place[axis] for axis in mesh}


def _layers_text(about: RunDescription, pp: int) -> str:
    """Return the stages of a rank of `pp` with their first and last layers, and the number of elements."""
    stages = [stage for stage, rank in enumerate(about.stage_ranks) if rank == pp]
    named = []
    for stage in stages[:2]:
        paths = [layer.path or layer.module for layer in about.layers if layer.stage == stage]
        named.append(paths[0] if len(paths) < 2 else f"{paths[0]} … {paths[-1]}" if paths else "")
    more = f" +{len(stages) - 2} stages" if len(stages) > 2 else ""
    return f"pp {pp}: {' | '.join(named)}{more}"


def _layers_list(about: RunDescription, pp: int) -> str:
    layers = [layer for layer in about.layers if about.stage_ranks[layer.stage] == pp]
    elements = sum(layer.elements for layer in layers)
    lines = [
        f"stage {layer.stage}: {layer.path or layer.module} ({layer.elements:,} elements)" for layer in layers
    ]
    return "\n".join([f"pp {pp}: {len(layers)} layers, {elements:,} elements", *lines])


def tensor_picture(tensor: PlannedTensor, mesh: Mapping[str, int]) -> str:
    """Return an SVG of how a tensor is sharded: colours for `tp` ranks, lines for `shard` and `cp`."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1  # a vector is one row
    columns = prod(tensor.shape[1:] if len(tensor.shape) > 1 else tensor.shape)
    scale = _MATRIX / max(rows, columns, 1)
    wide, high = max(columns * scale, 18), max(rows * scale, 18)
    elements = []
    for tp, tensor_shard in enumerate(tensor.pieces):
        for offsets, sizes in tensor_shard.boxes:
            x, y, w, h = area = _box(offsets, sizes, wide, high, (rows, columns))
            ranges = (f"{first:,} to {first + size:,}" for first, size in zip(offsets, sizes, strict=True))
            told = f"{tensor.name}: {' × '.join(ranges)}, of tp {tp}"
            whole = all(size == full for size, full in zip(sizes, tensor.shape, strict=True))
            name = "every rank of tp" if whole and len(tensor.pieces) > 1 else told
            owner, hue = ("all", _FIRST_HUE) if whole else (str(tp), _FIRST_HUE + tp)
            look = {"class_": "shard", "fill": rank_colour(hue)}
            elements.append(rect(x, y, w, h, name, **look, data_tp=owner))
            elements += _intervals(tensor_shard, area, owner, mesh, coloured=len(tensor.pieces) == 1)
            base = y + 12 if tensor_shard.intervals else y + h / 2 + 4
            if not whole and w > 30 and h > (30 if tensor_shard.intervals else 13):
                elements.append(text_at(x + w / 2, base, f"tp {tp}", class_="on"))
        if tensor_shard.boxes and all(sizes == tensor.shape for _, sizes in tensor_shard.boxes):
            break
    return inline_svg(tensor.name, round(wide) + 2, round(high) + 2, elements)


def tensor_text(tensor: PlannedTensor, about: RunDescription) -> str:
    """Return a sentence on how a tensor is divided: its shape, the axes, and the largest share of a rank."""
    shape = " × ".join(f"{size:,}" for size in tensor.shape)
    tensor_shard = tensor.pieces[0]
    own = sum(prod(sizes) for _, sizes in tensor_shard.boxes)
    parts = []
    if own < prod(tensor.shape):
        parts.append(f"tp {len(tensor.pieces)}")
    if tensor_shard.intervals:
        own = max(stop - start for start, stop in tensor_shard.intervals)
        parts += [f"{axis} {about.mesh[axis]}" for axis in ("shard", "cp") if about.mesh[axis] > 1]
    divided = f"divided over {' × '.join(parts)}: at most {own:,} elements a rank"
    divided = divided if parts else "whole on each rank"
    alike = f"; {tensor.alike - 1} more like it" if tensor.alike > 1 else ""
    on = f"pp {', '.join(map(str, tensor.pp))}" if about.mesh["pp"] > 1 else ""
    return f"{shape}, {divided}{'; on ' if on else ''}{on}{alike}"


def _box(
    offsets: Sequence[int], sizes: Sequence[int], wide: float, high: float, matrix: tuple[int, int]
) -> Area:
    rows, columns = max(matrix[0], 1), max(matrix[1], 1)
    if len(sizes) < 2:
        first, count = (offsets[0], sizes[0]) if sizes else (0, 1)
        return 1 + first / columns * wide, 1, count / columns * wide, high
    rest = prod(sizes[2:])
    x, breadth = offsets[1] * rest / columns * wide, sizes[1] * rest / columns * wide
    return 1 + x, 1 + offsets[0] / rows * high, breadth, sizes[0] / rows * high


def _intervals(
    tensor_shard: TensorShard, area: Area, tp: str, mesh: Mapping[str, int], *, coloured: bool
) -> Iterator[str]:
    """Yield a rectangle for each interval of a shard's elements, row after row from top to bottom."""
    if len(tensor_shard.boxes) != 1 or not tensor_shard.intervals:
        return
    fine = " fine" if len(tensor_shard.intervals) > _MOST_LINES else ""
    total = max(prod(tensor_shard.boxes[0][1]), 1)
    row = len(tensor_shard.boxes[0][1]) < 2
    for number, (start, stop) in enumerate(tensor_shard.intervals):
        shard, cp = divmod(number, mesh["cp"])
        owner = f"shard {shard}" + (f", cp {cp}" if mesh["cp"] > 1 else "")
        told = f"elements {start:,} to {stop:,} of the shard: tp {tp}, {owner}"
        style = f"--own: {rank_colour(_FIRST_HUE + number)}" if coloured else ""
        look = {"class_": f"interval{fine}", "style": style}
        data = {"data_tp": tp, "data_shard": str(shard), "data_cp": str(cp)}
        left, top, wide, high = _part(area, start / total, stop / total, row=row)
        yield rect(left, top, wide, high, told, **look, **data)
        if coloured and wide > 6.2 * len(owner) and high > 13:
            yield text_at(left + wide / 2, top + high / 2 + 4, owner, class_="on")


def _part(area: Area, start: float, stop: float, *, row: bool) -> Area:
    """Return the part from `start` to `stop` of a rectangle, along its row or downwards."""
    x, y, w, h = area
    if row:
        return x + w * start, y, w * (stop - start), h
    return x, y + h * start, w, h * (stop - start)
