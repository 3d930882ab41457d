"""Keys of the dropout masks of CUDA graphs, in device memory that the host writes before each replay.

A CUDA graph repeats the operations of a mask with the numbers that they were given when it was recorded. So
what differs between micro-batches and steps, the key and the first row, is read from memory: a row of the
table for each call of a dropout in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ranks.accelerator import sent
from plait.tensor.dropout_mask import DimPart, MaskKey, first_bits


class MaskCall(NamedTuple):
    """One call of a dropout within the run of a layer: which dropout, and which of its calls."""

    path: str
    """The dropout's path in the model."""
    number: int
    """Of its earlier calls in the run."""
    per_row: int = 0
    """Indexes of dim 0 for each row of the micro-batch."""


class MaskNotes:
    """Records which dropout masks an eager micro-batch draws at a stage, for its graphs' `MaskTable`."""

    def __init__(self) -> None:
        self.elements: dict[MaskCall, int] = {}
        """Per call, the elements of its whole tensor for each row of the micro-batch."""

    def key_and_parts(
        self, key: int, call: MaskCall, parts: dict[int, DimPart], shape: Sequence[int]
    ) -> tuple[int | MaskKey, dict[int, DimPart]]:
        """Record a dropout's `call`; return `key` and `parts` unchanged."""
        self.elements[call] = call.per_row * _elements_of_index(parts, shape)
        return key, parts


class MaskTable:
    """The random keys of a micro-batch's dropout masks at a stage, in device memory for its CUDA graphs.

    Of each mask the key and the `first_bits` of its first row: `[masks, 2]`, int64.
    """

    def __init__(self, elements: Mapping[MaskCall, int], device: torch.device) -> None:
        """`elements`: those that `MaskNotes` has noted."""
        self._elements = dict(elements)
        self._rows = {call: number for number, call in enumerate(elements)}
        self._values = torch.zeros((len(elements), 2), dtype=torch.int64, device=device)

    def fill(self, keys: Sequence[int], first_row: int) -> None:
        """Write this step's `keys`, in the order of `calls`, for a micro-batch that starts at `first_row`."""
        self._values.copy_(sent(self._values_for(keys, first_row), self._values.device))

    def holds(self, keys: Sequence[int], first_row: int) -> bool:
        """Return whether the table equals what `fill` would write; the host waits for the device."""
        return self._values.equal(sent(self._values_for(keys, first_row), self._values.device))

    def _values_for(self, keys: Sequence[int], first_row: int) -> Tensor:
        pairs = zip(keys, self._elements.values(), strict=True)
        values = [(key, first_bits(key, first_row * elements)) for key, elements in pairs]
        return torch.tensor(values, dtype=torch.int64).view(-1, 2)

    @property
    def calls(self) -> list[MaskCall]:
        """The dropout calls, in the order of the table's rows."""
        return list(self._rows)

    def key_and_parts(
        self, key: int, call: MaskCall, parts: dict[int, DimPart], shape: Sequence[int]
    ) -> tuple[int | MaskKey, dict[int, DimPart]]:
        """Return the mask's key as views of this table, and `parts` counted from the key's first row."""
        row: Tensor = self._values[self._rows[call]]
        return MaskKey(row[0], row[1]), {**parts, 0: parts[0]._replace(start=0)}


def _elements_of_index(parts: Mapping[int, DimPart], shape: Sequence[int]) -> int:
    """Return the elements of a whole tensor for one index of its dim 0."""
    whole = {dim % len(shape): part.whole for dim, part in parts.items()}
    return prod(whole.get(dim, size) for dim, size in enumerate(shape) if dim)
