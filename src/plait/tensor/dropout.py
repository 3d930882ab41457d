"""Dropout whose masks are the same in every layout: a function of seed, step, module and global index.

    mask of an element = f(seed, step, path of the module, number of its earlier calls there, global index)

An engine counts steps and sets which rows of the global batch a micro-batch has; a rule sets which part
of an activation a rank has in a region (see `plait.rules`); under context parallelism dim 1 has the positions
of `plait.tensor.running_sequence`. In plain PyTorch each call takes a key from torch's default generator.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from plait.errors import ModelError
from plait.plan.layout.sequence_layout import parts_of
from plait.plan.rules import join
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.autograd.node_tags import tag, tag_of
from plait.tensor.cuda_graph_dropout_keys import MaskCall, MaskNotes, MaskTable
from plait.tensor.dropout_mask import DimPart, DimRanges, MaskKey, keep_mask_of_ranges
from plait.tensor.running_sequence import running_sequence

LocatePart = Callable[[int], DimPart]
"""Returns which part of a dim this rank has, given the size of the part."""
_TAG = "plait.tensor.dropout"


class Dropout(nn.Module):
    """`nn.Dropout` with the same mask in every parallel layout; an engine replaces each `nn.Dropout` by it.

    In training mode sets elements to zero with probability `p`, also those that are not finite, and divides
    the others by `1 - p`. Dim 0 of the input has to be the micro-batch's rows, or the rows times another dim,
    row-major. Saves one byte an element for the backward: to remake the mask takes as long as the forward.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        is_number = isinstance(p, Real) and not isinstance(p, bool)
        if not is_number or not 0.0 <= p <= 1.0:
            raise ModelError(f"dropout has p = {p!r}: give a probability, from 0 to 1.")
        self.p = p
        self.generator: DropoutGenerator | None = None
        """The engine's; None in plain PyTorch."""
        self.parts: dict[int, LocatePart] = {}
        """By dim, how to locate the rank's part of the input; not for dim 0."""
        self.in_region = False
        """Whether a rule puts the module inside a region."""
        self.in_parts = False
        """Whether the input is a part of the sequence."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout. Raises ModelError in an engine unless the micro-batch's rows divide dim 0.

        Under context parallelism dims 0 and 1 have to be the micro-batch's rows and this rank's positions.
        """
        if not self.training or self.p == 0.0:
            return input
        trace = TRACE.get()
        if trace is None:
            keep = self.next_mask_maker(input.shape, input.device)()
        else:
            keep = trace.dropout_mask(self, input.shape, input.device)
        scale = 1.0 / (1.0 - self.p) if self.p < 1.0 else 1.0
        return tag_dropout(torch.where(keep, input, 0.0).mul_(scale), self)

    def next_mask_maker(self, shape: Sequence[int], device: torch.device) -> Callable[[], Tensor]:
        """Draw the next mask's key; return a function that computes it, bool `shape`, False where zero."""
        drawn, parts = self.next_mask(shape, device)
        ranges = self._position_ranges(shape, parts)
        key: int | MaskKey = drawn
        if self.generator is not None and self.generator.table is not None:
            assert self.generator.latest is not None, "next_mask has set it"
            key, parts = self.generator.table.key_and_parts(drawn, self.generator.latest, parts, shape)
        return partial(keep_mask_of_ranges, key, shape, self.p, parts, ranges, device)

    def next_mask(self, shape: Sequence[int], device: torch.device) -> tuple[int, dict[int, DimPart]]:
        """Draw the random key of the next mask; return it with this rank's part of the mask, by dim."""
        assert TRACE.get() is None, "the mask would be the same in each step"
        parts = {dim: locate(shape[dim]) for dim, locate in self.parts.items()}
        key = 0
        if self.generator is not None:
            key, parts[0] = self.generator.next_key(self, shape)
        elif device.type != "meta":
            key = int(torch.randint(-(2**63), 2**63 - 1, ()))
        return key, parts

    def _position_ranges(self, shape: Sequence[int], parts: dict[int, DimPart]) -> dict[int, DimRanges]:
        """Return under context parallelism the positions in dim 1, in place of a part of it in `parts`."""
        sequence = running_sequence()
        if sequence is None or sequence.group.size == 1:
            return {}
        part = parts.pop(1, None) if self.in_parts else None
        size = sequence.size if part is None else shape[1]
        fits = len(shape) > 1 and shape[1] == size and all(dim % len(shape) != 1 for dim in parts)
        if self.generator is not None:
            path, rows = self.generator.path_and_rows(self)
            if not fits or shape[0] != rows:
                raise ModelError(
                    f"the dropout {path} was given a tensor of shape {list(shape)}, but under context "
                    f"parallelism this rank has {size} positions of {rows} rows: give it one whose dims 0 "
                    "and 1 are rows and positions, or set plan.cp to 1."
                )
        if not fits:
            return {}  # on the meta device; the layer's run raises
        first = 0 if part is None else part.start
        held = parts_of(sequence.layout.ranges[sequence.group.index], slice(first, first + size))
        return {1: DimRanges(held, sequence.layout.length)}

    def extra_repr(self) -> str:
        """Return the text that `print` shows in the parentheses."""
        return f"p={self.p}"


def tag_dropout(result: Tensor, dropout: Dropout) -> Tensor:
    """Return `result`; if it is on the meta device, record that `dropout` created its autograd node."""
    return tag(result, _TAG, dropout)


def dropout_of(node: Node) -> Dropout | None:
    """Return the dropout that created a node of an autograd graph on the meta device, or None."""
    dropout: Dropout | None = tag_of(node, _TAG)
    return dropout


class _RunningLayer(NamedTuple):
    """The currently running layer and its micro-batch."""

    rows: range
    """The micro-batch's rows in the global batch."""
    path: str
    """The layer's path in the model."""
    names: Mapping[int, str]
    """Each dropout's name in the layer, by the module's `id`."""
    calls: dict[int, int]
    """Each dropout's number of calls in this run, by the module's `id`."""

    def path_of(self, module: Dropout) -> str:
        """Return the path of a dropout in the model."""
        return join(self.path, self.names.get(id(module), ""))


def set_region_part(module: Dropout, dim: int, index: int, count: int) -> None:
    """Make a dropout in a tensor-parallel region use the masks of part `index` of `count` along `dim`."""
    module.in_region = True
    module.parts[dim] = partial(_equal_part, index, count)


def _equal_part(index: int, count: int, size: int) -> DimPart:
    return DimPart(index * size, count * size)


def set_sequence_part(module: Dropout, dim: int, locate: LocatePart) -> None:
    """Make a dropout outside tensor-parallel regions use the masks of this rank's part of sequence `dim`."""
    module.in_parts = True
    module.parts[dim] = locate


@dataclass
class DropoutGenerator:
    """Determines one rank's dropout masks by seed, step, batch rows and the layer that runs."""

    seed: int
    step: int = 0
    rows: Sequence[range] = ()
    """Each micro-batch's rows in the global batch."""
    table: MaskNotes | MaskTable | None = None
    """Where the keys of masks are for the graphs of the running micro-batch, or noted for them."""
    latest: MaskCall | None = None
    """The call of a dropout for which a key was drawn last, where there is a table."""
    _layer: _RunningLayer | None = field(default=None, repr=False)

    def attach_to(self, layers: Iterable[nn.Module]) -> None:
        """Set this generator on every `Dropout` in `layers`."""
        for layer in layers:
            for module in layer.modules():
                if isinstance(module, Dropout):
                    module.generator = self

    @contextmanager
    def running(self, microbatch: int, path: str, names: Mapping[int, str]) -> Iterator[None]:
        """Context in which the layer at `path` runs: masks depend on it, and on its dropouts' `names`."""
        # An evaluation sets no rows: its dropouts need no mask.
        rows = self.rows[microbatch] if microbatch < len(self.rows) else range(0)
        before, self._layer = self._layer, _RunningLayer(rows, path, names, {})
        try:
            yield
        finally:
            self._layer = before

    def next_key(self, module: Dropout, shape: Sequence[int]) -> tuple[int, DimPart]:
        """Count a dropout's call; return the random key of its mask, and at which batch row it starts."""
        if self._layer is None:
            raise ModelError(
                f"a dropout with p = {module.p} runs outside of its layer's forward, as in a "
                "torch.utils.checkpoint of the model's own: leave that to plan.recompute."
            )
        rows, calls, path = self._layer.rows, self._layer.calls, self._layer.path_of(module)
        if not shape or not rows or shape[0] % len(rows):
            raise ModelError(
                f"the dropout {path} was given a tensor of shape {list(shape)}, but the micro-batch has "
                f"{len(rows)} rows: give it one whose dim 0 is the rows, or a multiple of them."
            )
        call = calls.get(id(module), 0)
        calls[id(module)] = call + 1
        per_row = shape[0] // len(rows)
        if self.table is not None:
            self.latest = MaskCall(path, call, per_row)
        return key_of(self.seed, self.step, path, call), DimPart(per_row * rows.start, 0)

    def fill(self, table: MaskTable, microbatch: int) -> None:
        """Write the keys of this step's masks of a micro-batch to the table that its CUDA graphs read."""
        if table.calls:
            table.fill(self._keys_of(table), self.rows[microbatch].start)

    def has_filled(self, table: MaskTable, microbatch: int) -> bool:
        """Return whether a table holds this step's mask keys of a micro-batch; the host waits for it."""
        return not table.calls or table.holds(self._keys_of(table), self.rows[microbatch].start)

    def _keys_of(self, table: MaskTable) -> list[int]:
        return [key_of(self.seed, self.step, call.path, call.number) for call in table.calls]

    def path_and_rows(self, module: Dropout) -> tuple[str, int]:
        """Return the path of a dropout in the model, and the number of rows of the micro-batch."""
        assert self._layer is not None
        return self._layer.path_of(module), len(self._layer.rows)


def key_of(seed: int, step: int, path: str, call: int) -> int:
    """Return the random key of the mask of one dropout call in a step: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{step}/{path}/{call}".encode(), digest_size=8, person=b"plait.dropout")
    return int.from_bytes(digest.digest(), "little", signed=True)


def names_of(layer: nn.Module) -> dict[int, str]:
    """Return each dropout's name in `layer`, by the module's `id`."""
    return {id(module): name for name, module in layer.named_modules() if isinstance(module, Dropout)}


def is_plain_dropout(module: nn.Module) -> bool:
    """Return whether `module` is exactly an `nn.Dropout`: no subclass, no forward set on the instance."""
    return type(module) is nn.Dropout and "forward" not in vars(module)


def from_plain_dropout(module: nn.Module) -> Dropout:
    """Return a new `Dropout` with the state, mode and hooks of an `nn.Dropout`."""
    dropout = Dropout()
    vars(dropout).update(copy.deepcopy(vars(module)))
    return dropout
