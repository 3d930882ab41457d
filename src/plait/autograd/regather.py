"""What a linear read, and the gradient that came to it, gathered again for its weight gradient: less is kept.

forward    piece ─ all-gather → whole → linear         the linear keeps this rank's piece
I          piece ─ all-gather → whole → linear         likewise of the gradient, if W does not follow at once
W          piece ─ all-gather → whole → weight work    once for all linears that read the same
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.autograd.piece_collectives import PendingTensor, start_whole
from plait.comm.group import Group


@dataclass(frozen=True)
class Gather:
    """How pieces become a whole: see `start_whole`."""

    group: Group
    dim: int
    size: int

    def start(self, piece: Tensor) -> PendingTensor:
        """Start the all-gather."""
        return start_whole(piece, self.group, self.dim, self.size)


class Regathered:
    """A whole tensor that is made of a piece when it is asked for, once."""

    def __init__(self, piece: Tensor, gather: Gather) -> None:
        self._piece = piece
        self._gather = gather
        self._pending: PendingTensor | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Start to gather, for who has something else to do meanwhile."""
        if self._pending is None:
            self._pending = self._gather.start(self._piece)

    def whole(self) -> Tensor:
        """The whole tensor, which lives as long as this object. Communication: one all-gather, once."""
        if self._whole is None:
            self.start()
            assert self._pending is not None
            self._whole = self._pending()
        return self._whole


@dataclass
class GatherRegistry:
    """Of which pieces inputs and gradients of linears were gathered, and what is gathered again."""

    _pieces: MutableMapping[Tensor, tuple[Tensor, Gather, int]] = field(
        default_factory=WeakTensorKeyDictionary
    )
    """Of a whole tensor its piece, how it was gathered, and the version that it then had."""
    _regathered: MutableMapping[tuple[object, ...], Regathered] = field(default_factory=WeakValueDictionary)

    def add(self, whole: Tensor, piece: Tensor, gather: Gather) -> None:
        """`whole` was gathered of `piece`, and need not be kept for weight work."""
        self._pieces[whole] = piece, gather, _version(whole)

    def of(self, whole: Tensor) -> tuple[Tensor, Gather] | None:
        """The piece that a tensor was gathered of, if it need not be kept: nobody has written to it since."""
        if not self._pieces:  # as in all that is not gathered again: each linear asks
            return None
        piece, gather, version = self._pieces.get(whole, (None, None, -1))
        if piece is None or gather is None or version != _version(whole):
            return None
        return piece, gather

    def again(self, piece: Tensor, gather: Gather) -> Regathered:
        """What becomes whole of `piece`: the same for all who ask as long as one of them keeps it."""
        key = id(piece.untyped_storage()), piece.storage_offset(), piece.shape, piece.stride()
        found = self._regathered.get(key)
        if found is None:
            found = self._regathered[key] = Regathered(piece.detach(), gather)
        return found


def _version(tensor: Tensor) -> int:
    """How often somebody has written to it."""
    return tensor._version
