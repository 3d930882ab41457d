"""Sums of tensors that are to keep their bits until the program itself writes to them.

torch counts the program's writes to a tensor (`Tensor._version`). A bit that flips in memory, or what another
program writes, leaves the count as it was: so a tensor of another sum and the same count has wrong bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.corruption.word_sums import WordSum
from plait.ranks.device import read_later
from plait.tensor.autograd.regather import version_of


class NamedTensor(NamedTuple):
    """A tensor that a rank holds between steps."""

    parameter: str
    """The name of the parameter that it belongs to, or of a buffer."""
    what: str
    """`value`, `gradient`, or `optimizer state` and its key."""
    tensor: Tensor
    moves: bool = False
    """Whether plait copies it between devices: it then lies elsewhere, with the same bits."""

    def __str__(self) -> str:
        return f"the {self.what} of {self.parameter}"


@dataclass
class RecordedSum:
    """The sum of a tensor's words when it was recorded."""

    named: NamedTensor
    words: WordSum | None
    """None for a tensor that moves, whose memory is not to be kept."""
    version: int
    sum: Tensor

    @property
    def is_written(self) -> bool:
        """Whether the program has written to the tensor since, or has replaced its memory."""
        tensor = self.named.tensor
        return version_of(tensor) != self.version or not (self.words is None or self.words.is_of(tensor))

    def compute(self) -> Tensor:
        """Return the sum of the tensor as it is now."""
        return (self.words or WordSum(self.named.tensor)).compute()


def recorded_sum(named: NamedTensor, before: RecordedSum | None = None) -> RecordedSum:
    """Return the sum of a tensor as it is now; `before`: an earlier one under its name."""
    words = None if before is None else before.words
    if words is None or not words.is_of(named.tensor):
        words = WordSum(named.tensor)
    return RecordedSum(named, None if named.moves else words, version_of(named.tensor), words.compute())


class ChangedTensor(NamedTuple):
    """A tensor whose bits have changed, though the program did not write to it."""

    named: NamedTensor
    is_one_bit: bool
    """Whether the sum differs as if one bit had flipped."""


class RecordedSums:
    """The sums of some tensors of one rank, to be compared with those of the same tensors later."""

    def __init__(self) -> None:
        self.entries: Sequence[RecordedSum] = ()

    def record(self, tensors: Iterable[NamedTensor], *, only_written: bool = False) -> None:
        """Compute the sums of `tensors`, which take the place of those that were recorded before.

        With `only_written` the sum of a tensor stays to which the program has not written since.
        """
        known = {(one.named.parameter, one.named.what): one for one in self.entries}
        self.entries = [
            before
            if only_written
            and before is not None
            and before.named.tensor is named.tensor
            and not before.is_written
            else recorded_sum(named, before)
            for named in tensors
            if named.tensor.numel()
            for before in [known.get((named.parameter, named.what))]
        ]

    def forget(self) -> None:
        """Record no tensors."""
        self.entries = ()

    def compare(self) -> Callable[[], list[ChangedTensor]]:
        """Compute the sums again; return a function that waits for them, and returns the changed tensors.

        Tensors that the program has written to are left out.
        """
        alike: dict[torch.device, list[RecordedSum]] = {}
        for one in self.entries:
            if not one.is_written:
                alike.setdefault(one.sum.device, []).append(one)
        waiting = []
        for entries in alike.values():
            now = torch.stack([one.compute() for one in entries])
            waiting.append((entries, read_later(now - torch.stack([one.sum for one in entries]))))
        return lambda: [
            ChangedTensor(entries[place].named, is_power_of_two(int(differences[place])))
            for entries, read in waiting
            for differences in [read()]
            for place in differences.nonzero().flatten().tolist()
        ]


def is_power_of_two(difference: int) -> bool:
    """Return whether a difference of two sums is 2^k or -2^k, as that of a single flipped bit."""
    size = abs(difference)
    return size & (size - 1) == 0
