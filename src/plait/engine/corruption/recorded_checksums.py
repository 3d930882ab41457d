"""`RecordedChecksums`: sums of tensors' bytes, which later show whether memory changed without a write.

torch counts the program's writes to a tensor (`Tensor._version`). A bit that flips in memory, or what another
program writes, leaves the count as it was: so a tensor of another sum and the same count has wrong bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.corruption.word_checksums import WordChecksums
from plait.ranks.accelerator import read_later
from plait.tensor.autograd.regathered_activations import version_of

STATE = "optimizer state"
"""How the names of tensors of optimizer state begin."""


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


class ChangedTensor(NamedTuple):
    """A tensor whose bits have changed, though the program did not write to it."""

    named: NamedTensor
    is_one_bit: bool
    """Whether its sum differs as if one bit had flipped."""


class RecordedNumbers(NamedTuple):
    """The recorded numbers (checksums, and small tensors whole) of the tensors on one device."""

    places: Sequence[int]
    """Of these tensors among all that are recorded."""
    words: WordChecksums | None
    """None where tensors move, whose memory is not to be kept."""
    numbers: Tensor
    """int64, as `WordChecksums.compute` returns them."""
    owners: Sequence[int]
    """For each number, the place of its tensor among all that are recorded."""


class RecordedChecksums:
    """Checksums of some tensors of one rank, to be compared later with new ones of the same tensors."""

    def __init__(self) -> None:
        self.tensors: Sequence[NamedTensor] = ()
        self.parts: Sequence[RecordedNumbers] = ()
        """One for each device."""
        self.are_recorded = False
        self._each: Sequence[Tensor] = ()
        self._addresses: Sequence[int] = ()
        self._versions: Sequence[int] = ()

    def record(self, tensors: Sequence[NamedTensor]) -> None:
        """Compute and store the checksums of `tensors`, in place of those recorded before."""
        each = [one.tensor for one in tensors]
        addresses = list(map(Tensor.data_ptr, each))
        stay = addresses == self._addresses and all(map(is_, each, self._each))
        if not stay:
            self.tensors, self._each, self._addresses = tensors, each, addresses
            self.parts = _parts_of(tensors)
        self._versions = list(map(version_of, each))
        self.parts = [part._replace(numbers=self._compute(part)) for part in self.parts]
        self.are_recorded = True
        if any(one.moves for one in tensors):
            self.parts = [part._replace(words=None) for part in self.parts]

    def forget(self) -> None:
        """Drop the recorded checksums: `compare` finds nothing until `record` is called again."""
        self.are_recorded = False

    @property
    def are_written(self) -> list[bool]:
        """Whether the program has written to each tensor since `record`, or has replaced its memory."""
        versions, addresses = list(map(version_of, self._each)), list(map(Tensor.data_ptr, self._each))
        if versions == self._versions and addresses == self._addresses:
            return [False] * len(versions)
        now = zip(self.tensors, versions, addresses, strict=True)
        recorded = zip(self._versions, self._addresses, strict=True)
        return [
            version != before[0] or (address != before[1] and not one.moves)
            for (one, version, address), before in zip(now, recorded, strict=True)
        ]

    def compare(self) -> Callable[[], list[ChangedTensor]]:
        """Start to compute checksums again; return a function that waits and returns the changed tensors.

        Tensors that the program has written to are left out.
        """
        if not self.are_recorded:
            return list
        written, tensors, waiting = self.are_written, self.tensors, []
        for part in self.parts:
            if not all(written[place] for place in part.places):
                waiting.append((part.owners, read_later(self._compute(part) - part.numbers)))

        def read() -> list[ChangedTensor]:
            changed: dict[int, int] = {}
            for owners, read_differences in waiting:
                differences = read_differences()
                for number in differences.nonzero().flatten().tolist():
                    owner = owners[number]
                    one_bit = owner not in changed and is_power_of_two(int(differences[number]))
                    changed[owner] = one_bit
            return [
                ChangedTensor(tensors[place], bool(one_bit))
                for place, one_bit in changed.items()
                if not written[place]
            ]

        return read

    def _compute(self, part: RecordedNumbers) -> Tensor:
        words = part.words or WordChecksums([self._each[place] for place in part.places])
        return words.compute()


def _parts_of(tensors: Sequence[NamedTensor]) -> list[RecordedNumbers]:
    """Return for each device its tensors and the `WordChecksums` that computes their numbers."""
    places: dict[torch.device, list[int]] = {}
    for place, one in enumerate(tensors):
        places.setdefault(one.tensor.device, []).append(place)
    parts = []
    for device, own in places.items():
        words = WordChecksums([tensors[place].tensor for place in own])
        owners = [own[number] for number in words.owners]
        parts.append(RecordedNumbers(own, words, torch.empty(0, device=device), owners))
    return parts


def is_power_of_two(difference: int) -> bool:
    """Return whether a difference of two sums is 2^k or -2^k, as that of a single flipped bit."""
    size = abs(difference)
    return size & (size - 1) == 0
