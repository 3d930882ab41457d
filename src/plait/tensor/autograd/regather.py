"""Linears that save a piece of their input and output gradient, and re-gather it for the weight gradient.

forward    piece ─ all-gather → whole → linear             the linear saves a piece of its input
I          piece ─ all-gather → whole → linear             and of its output gradient, unless `W` follows
W          piece ─ all-gather → whole → weight gradient    once for all linears with the same input
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.ranks.group import Group
from plait.tensor.autograd.uneven_collectives import PendingTensor, start_whole


@dataclass(frozen=True)
class Gather:
    """The arguments of an all-gather by `start_whole`: the group, the dim, and the dim's whole size."""

    group: Group
    dim: int
    size: int

    def start(self, piece: Tensor) -> PendingTensor:
        """Start the all-gather of `piece`."""
        return start_whole(piece, self.group, self.dim, self.size)


class Regathered:
    """A tensor that is gathered from the ranks' pieces on first use, and then cached."""

    def __init__(self, piece: Tensor, gather: Gather) -> None:
        self._piece = piece
        self._gather = gather
        self._pending: PendingTensor | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Start the all-gather, unless it has started; `whole` waits for it."""
        if self._pending is None:
            self._pending = self._gather.start(self._piece)

    def whole(self) -> Tensor:
        """Return the whole tensor and cache it. Communication: one all-gather, on first use."""
        if self._whole is None:
            self.start()
            assert self._pending is not None
            self._whole = self._pending()
        return self._whole


@dataclass
class GatherRegistry:
    """Maps each gathered tensor (input or output gradient of a linear) to its piece, to gather it again."""

    _pieces: MutableMapping[Tensor, tuple[Tensor, Gather, int]] = field(
        default_factory=WeakTensorKeyDictionary
    )
    """By whole tensor: the piece, the all-gather, and the version counter after it."""
    is_used: bool = False
    """Whether a tensor was ever registered or gathered again; every linear asks."""
    _regathered: MutableMapping[tuple[object, ...], Regathered] = field(default_factory=WeakValueDictionary)

    def add(self, whole: Tensor, piece: Tensor, gather: Gather) -> None:
        """Register that `whole` was gathered from `piece`, so that saving `piece` suffices."""
        self._pieces[whole], self.is_used = (piece, gather, version_of(whole)), True

    def of(self, whole: Tensor) -> tuple[Tensor, Gather] | None:
        """Return the piece and all-gather of `whole`; None if unregistered or written to since."""
        if not self.is_used:
            return None
        piece, gather, version = self._pieces.get(whole, (None, None, -1))
        if piece is None or gather is None or version != version_of(whole):
            return None
        return piece, gather

    def again(self, piece: Tensor, gather: Gather) -> Regathered:
        """Return a `Regathered` of `piece`: that of an earlier call if it still exists, else a new one."""
        self.is_used = True
        key = id(piece.untyped_storage()), piece.storage_offset(), piece.shape, piece.stride()
        found = self._regathered.get(key)
        if found is None:
            found = self._regathered[key] = Regathered(piece.detach(), gather)
        return found


def version_of(tensor: Tensor) -> int:
    """Return the version counter, which each in-place write increases."""
    return tensor._version
