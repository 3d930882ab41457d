"""Dropout whose masks are the same in every layout: a function of seed, step, place and global index.

    mask of an element = f(seed, step, path of the module, how often it ran there before, global index)

An engine counts steps and says which rows of the global batch a micro-batch has; a rule says for which piece
of a value in a region a rank draws (see `plait.rules`). In plain PyTorch each call takes a key from torch's
own generator.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from plait.autograd.marks import mark, mark_of
from plait.autograd.mask import Span, keep_mask
from plait.errors import ModelError
from plait.rules import join

Piece = Callable[[int], Span]
"""Given the size of a rank's piece of a dim: which piece of the whole dim it is."""
_MARK = "plait.autograd.dropout"


class Dropout(nn.Module):
    """Sets elements to zero with probability `p` and divides the rest by `1 - p`; in evaluation mode nothing.

    As `nn.Dropout`, in whose place an engine puts it: in an engine it draws the same mask in every layout.
    Dim 0 of what it is given has to be the micro-batch's rows, or what each row has, row by row. What is
    dropped is zero even if it was not finite. One byte an element is saved for the backward: to draw again
    would take as long as the forward.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ModelError(f"dropout has p = {p!r}: give a probability, from 0 to 1.")
        self.p = p
        self.draws: Draws | None = None
        """Of the engine that it is a part of."""
        self.pieces: dict[int, Piece] = {}
        """Of the dims of which a rank has a piece only, but dim 0."""
        self.in_region = False
        """Whether a rule says that it stands inside a region."""
        self.in_pieces = False
        """Whether it stands where the sequence is in pieces."""

    def forward(self, input: Tensor) -> Tensor:
        """Of any shape `[rows, ...]`; ModelError where an engine's dim 0 is no multiple of the rows."""
        if not self.training or self.p == 0.0:
            return input
        spans = {dim: piece(input.shape[dim]) for dim, piece in self.pieces.items()}
        key = 0
        if self.draws is not None:
            key, spans[0] = self.draws.draw(self, input.shape)
        elif not input.is_meta:
            key = int(torch.randint(-(2**63), 2**63 - 1, ()))
        keep = keep_mask(key, input.shape, self.p, spans, input.device)
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 1.0
        return mark(torch.where(keep, input, 0.0).mul_(scale), _MARK, self)

    def extra_repr(self) -> str:
        """What `print` says of it."""
        return f"p={self.p}"


def dropout_of(node: Node) -> Dropout | None:
    """The dropout that made a node of an autograd graph on the meta device, if one did."""
    dropout: Dropout | None = mark_of(node, _MARK)
    return dropout


class Place(NamedTuple):
    """Where a layer runs."""

    rows: range
    """Of the global batch."""
    path: str
    """Of the layer in the model."""
    names: Mapping[int, str]
    """Of each dropout in the layer, by its `id`."""
    calls: dict[int, int]
    """How often each has run there."""


def draw_for_piece(module: Dropout, dim: int, index: int, count: int) -> None:
    """Let `module` draw for piece `index` of `count` equal pieces of `dim`, in a region."""
    module.in_region = True
    module.pieces[dim] = partial(_equal_piece, index, count)


def _equal_piece(index: int, count: int, size: int) -> Span:
    return Span(index * size, count * size)


def draw_for_sequence(module: Dropout, dim: int, piece: Piece) -> None:
    """Let `module` draw for this rank's piece of the sequence, which is `dim`, outside of regions."""
    module.in_pieces = True
    module.pieces[dim] = piece


@dataclass
class Draws:
    """What the masks of one rank depend on, besides the module: it goes along with the step."""

    seed: int
    step: int = 0
    rows: Sequence[range] = ()
    """Of the global batch, those of each micro-batch."""
    _place: Place | None = field(default=None, repr=False)

    def give_to(self, layers: Iterable[nn.Module]) -> None:
        """Every dropout of `layers` draws by this."""
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, Dropout):
                    module.draws = self

    @contextmanager
    def at(self, microbatch: int, path: str, names: Mapping[int, str]) -> Iterator[None]:
        """While it is entered, the layer at `path` runs, with dropouts of these `names` (see `names_of`)."""
        # Who only evaluates, says nothing of rows, and draws nothing.
        rows = self.rows[microbatch] if microbatch < len(self.rows) else range(0)
        before, self._place = self._place, Place(rows, path, names, {})
        try:
            yield
        finally:
            self._place = before

    def draw(self, module: Dropout, shape: Sequence[int]) -> tuple[int, Span]:
        """The key of the mask that `module` needs now, and where its rows begin."""
        if self._place is None:
            raise ModelError(
                f"a dropout with p = {module.p} runs outside of its layer's forward, as in a "
                "torch.utils.checkpoint of the model's own: leave that to plan.recompute."
            )
        rows, path, names, calls = self._place
        path = join(path, names.get(id(module), ""))
        if not shape or not rows or shape[0] % len(rows):
            raise ModelError(
                f"the dropout {path} was given a tensor of shape {list(shape)}, but the micro-batch has "
                f"{len(rows)} rows: give it one whose dim 0 is the rows, or a multiple of them."
            )
        call = calls.get(id(module), 0)
        calls[id(module)] = call + 1
        return key_of(self.seed, self.step, path, call), Span(shape[0] // len(rows) * rows.start, 0)


def key_of(seed: int, step: int, path: str, call: int) -> int:
    """64 bits with a sign, for one run of a module in a step."""
    digest = hashlib.blake2b(f"{seed}/{step}/{path}/{call}".encode(), digest_size=8, person=b"plait.dropout")
    return int.from_bytes(digest.digest(), "little", signed=True)


def names_of(layer: nn.Module) -> dict[int, str]:
    """The name in `layer` of each of its dropouts, by their `id`."""
    return {id(module): name for name, module in layer.named_modules() if isinstance(module, Dropout)}


def stands_in_for(module: nn.Module) -> bool:
    """Whether a `Dropout` does what `module` does: of the class itself, without a forward of its own."""
    return type(module) is nn.Dropout and "forward" not in vars(module)


def stand_in(module: nn.Module) -> Dropout:
    """A `Dropout` with the state, mode and hooks of an `nn.Dropout`. It never writes to its input."""
    twin = Dropout()
    vars(twin).update(copy.deepcopy(vars(module)))
    return twin
