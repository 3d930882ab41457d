"""Where each parameter of a unit lies in its flat buffer, and where the buffer is cut between ranks.

    | query.weight            | up.weight        …  | query.bias |pad| … |
    |        rank 0       |       rank 1       |        rank 2         |

All ranks hold pieces of one size, so a collective moves them without a copy. A cut on the boundary between
two rows gives a piece that any checkpoint format can describe: so parameters start at multiples of their
rows, and pieces are multiples of every row, as long as the padding is small. Where it is not (tiny layers,
many ranks) cuts fall on multiples of `ALIGNMENT` elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

import torch

ALIGNMENT = 16
"""Elements. Fused optimizers give bit-equal results wherever a buffer is cut at multiples of 8."""
MOST_PADDING = 0.005
"""Of a buffer's elements, that cuts between rows may cost."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a flat buffer: elements `start … start + numel`."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.shape.numel()

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The slot's part of `flat`, in the parameter's shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Offsets:
    """The places of the parameters of one buffer of `size` elements, cut into `pieces` of one size."""

    places: tuple[Slot, ...]
    size: int
    pieces: int

    @property
    def piece(self) -> int:
        """Elements of one rank's piece."""
        return self.size // self.pieces

    def bounds(self, slot: Slot) -> tuple[int, ...]:
        """The elements of a parameter at which it is cut: rank `i` holds `bounds[i] … bounds[i + 1]`."""
        cuts = (number * self.piece - slot.start for number in range(1, self.pieces))
        within = (min(max(cut, 0), slot.shape.numel()) for cut in cuts)
        return (0, *within, slot.shape.numel())


def place(shapes: Mapping[str, torch.Size], pieces: int) -> Offsets:
    """Lay parameters of these shapes out in a buffer for `pieces` ranks; for one in the given order."""
    if pieces > 1:
        elements = sum(shape.numel() for shape in shapes.values())
        by_rows = _place_by_rows(shapes, pieces)
        if by_rows.size - elements <= MOST_PADDING * elements:
            return by_rows
    starts, stop = {}, 0
    for name, shape in shapes.items():
        starts[name] = _up(stop, ALIGNMENT)
        stop = starts[name] + shape.numel()
    return _slots(shapes, starts, pieces * _up(-(-stop // pieces), ALIGNMENT), pieces)


def _place_by_rows(shapes: Mapping[str, torch.Size], pieces: int) -> Offsets:
    """Long rows first: where they are multiples of the shorter ones nothing is lost between parameters."""
    rows = {name: max(1, prod(shape[1:])) for name, shape in shapes.items()}
    starts, stop = {}, 0
    for name in sorted(shapes, key=lambda name: -rows[name]):
        starts[name] = _up(stop, lcm(rows[name], ALIGNMENT))
        stop = starts[name] + shapes[name].numel()
    return _slots(shapes, starts, pieces * _up(-(-stop // pieces), lcm(ALIGNMENT, *rows.values())), pieces)


def _slots(shapes: Mapping[str, torch.Size], starts: Mapping[str, int], size: int, pieces: int) -> Offsets:
    return Offsets(tuple(Slot(name, shapes[name], start) for name, start in starts.items()), size, pieces)


def _up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step
