"""Offsets of a unit's parameters in their flat buffer, and the cuts between the ranks' pieces.

    | query.weight            | up.weight        …  | query.bias |pad| … |
    |        rank 0       |       rank 1       |        rank 2         |

All pieces have the same size, so that a collective moves them without a copy. A piece that ends between two
rows can be described by any checkpoint format: so parameters start at multiples of their rows, and pieces are
multiples of every row, as long as the padding is small. Where it is not (tiny layers, many ranks) cuts fall
on multiples of `ALIGNMENT` elements.

Matrices come before vectors, each in the order of the model: so the weights of query, key and value follow
each other, and so do their biases (`plait.tensor.autograd.joined_linears`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

import torch

ALIGNMENT = 16
"""Elements. Fused optimizers give bit-equal results wherever a buffer is cut at multiples of 8."""
MOST_PADDING = 0.005
"""The largest share of a buffer's elements that is padded for cuts between rows."""


@dataclass(frozen=True)
class Slot:
    """The range of one parameter's elements in a flat tensor: `start … start + numel`."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        """Index after the parameter's last element in the flat tensor."""
        return self.start + self.shape.numel()

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's elements of `flat`, in its shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Offsets:
    """The position of each parameter in a flat buffer of `size` elements, cut into `pieces` equal pieces."""

    slots: tuple[Slot, ...]
    size: int
    pieces: int

    @property
    def piece(self) -> int:
        """Number of elements of one rank's piece."""
        return self.size // self.pieces

    def bounds(self, slot: Slot) -> tuple[int, ...]:
        """Return where a parameter is cut: rank `i` holds its elements `bounds[i] … bounds[i + 1]`."""
        cuts = (number * self.piece - slot.start for number in range(1, self.pieces))
        within = (min(max(cut, 0), slot.shape.numel()) for cut in cuts)
        return (0, *within, slot.shape.numel())


def compute_offsets(shapes: Mapping[str, torch.Size], pieces: int) -> Offsets:
    """Return the offsets of parameters of these `shapes` in a flat buffer of `pieces` equal pieces."""
    if pieces > 1:
        elements = sum(shape.numel() for shape in shapes.values())
        by_rows = _offsets_by_rows(shapes, pieces)
        if by_rows.size - elements <= MOST_PADDING * elements:
            return by_rows
    starts, stop = {}, 0
    for name, shape in sorted(shapes.items(), key=lambda item: len(item[1]) < 2):
        starts[name] = _round_up(stop, ALIGNMENT)
        stop = starts[name] + shape.numel()
    starts = {name: starts[name] for name in shapes}
    return _offsets(shapes, starts, pieces * _round_up(-(-stop // pieces), ALIGNMENT), pieces)


def _offsets_by_rows(shapes: Mapping[str, torch.Size], pieces: int) -> Offsets:
    """Return offsets at multiples of each parameter's row length, so that cuts fall between rows.

    Parameters with longer rows come first. No padding is needed where long rows are multiples of shorter
    ones.
    """
    rows = {name: max(1, prod(shape[1:])) for name, shape in shapes.items()}
    starts, stop = {}, 0
    for name in sorted(shapes, key=lambda name: -rows[name]):
        starts[name] = _round_up(stop, lcm(rows[name], ALIGNMENT))
        stop = starts[name] + shapes[name].numel()
    piece = _round_up(-(-stop // pieces), lcm(ALIGNMENT, *rows.values()))
    return _offsets(shapes, starts, pieces * piece, pieces)


def _offsets(shapes: Mapping[str, torch.Size], starts: Mapping[str, int], size: int, pieces: int) -> Offsets:
    return Offsets(tuple(Slot(name, shapes[name], start) for name, start in starts.items()), size, pieces)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
