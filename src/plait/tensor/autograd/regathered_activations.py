"""Linears that save a rank's part of their input, and all-gather it again for the weight gradient.

forward    part ─ all-gather → whole → linear              the linear saves a part of its input
I          part ─ all-gather → whole → linear              and of its output gradient, unless `W` follows
W          part ─ all-gather → whole → weight gradient     once for all linears with the same input

Parts are those of `divide`: the first ranks may hold one element more. On the meta device nothing is
communicated. Results of collectives are no views, so a layer may write to them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from math import prod
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.errors import ModelError
from plait.plan.layout.layout import divide
from plait.ranks.collectives import all_gather, reduce_scatter
from plait.ranks.group import Group

PendingTensor = Callable[[], Tensor]
"""Waits for a started collective and returns its result. To be called once."""


def own_range(whole: Tensor, group: Group, dim: int) -> Tensor:
    """Return the view of `whole` that is this rank's range along `dim`."""
    own = divide(whole.shape[dim], group.size)[group.index]
    return whole.narrow(dim, own.start, len(own))


@dataclass(frozen=True)
class Gather:
    """How a tensor is all-gathered from the ranks' parts: the group, the dim, and the size along it."""

    group: Group
    dim: int
    size: int

    def start(self, part: Tensor) -> PendingTensor:
        """Start the all-gather of `part`, padded to the largest part; return a function that waits for it.

        The function returns the whole tensor. Float8 is sent as bytes, which every backend sends. ModelError
        where the size of `part` is not this rank's.
        """
        if part.dtype.itemsize == 1 and part.is_floating_point():
            pending = self.start(part.view(torch.uint8))
            return lambda: pending().view(part.dtype)
        group, size = self.group, self.size
        cuts, dim = divide(size, group.size), self.dim % part.dim()
        own = cuts[group.index]
        if part.is_meta and part.shape[dim] == size > len(own):  # whole: the gradient proof names the fault
            return lambda: part.new_empty(*part.shape[:dim], size, *part.shape[dim + 1 :])
        if part.shape[dim] != len(own):
            raise ModelError(
                f"a tensor of shape {list(part.shape)} is gathered over {group.name}, whose ranks cut {size} "
                f"along dim {dim}, so that this one has {len(own)}: let layers with the rule sequence give "
                "as many positions as they get, or take that rule off them."
            )
        mine = _padded(part, dim, len(cuts[0]))
        gathered_shape, whole = (group.size * mine.shape[0], *mine.shape[1:]), None
        if len(cuts[-1]) == len(cuts[0]) and prod(part.shape[:dim]) == 1:  # contiguous: gathered in place
            whole = mine.new_empty(*mine.shape[:dim], size, *mine.shape[dim + 1 :])
        out = mine.new_empty(gathered_shape) if whole is None else whole.view(gathered_shape)
        if mine.is_meta:
            group.skip("all_gather", mine)
        wait: PendingTensor = (
            (lambda: out) if mine.is_meta else all_gather(mine, group, out=out, checked=False).wait
        )

        def finish() -> Tensor:
            gathered = wait()
            if whole is not None:
                return whole
            parts = zip(gathered.chunk(group.size), cuts, strict=True)
            return torch.cat([one.narrow(dim, 0, len(cut)) for one, cut in parts], dim)

        return finish

    def whole_shape(self, part: Tensor) -> list[int]:
        """Return the shape that `part` has once it is all-gathered."""
        shape = list(part.shape)
        shape[self.dim] = self.size
        return shape

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole tensor that is gathered from the ranks' parts. Communication: one all-gather."""
        return self.start(part)()


def start_reduce_scatter(summand: Tensor, group: Group, dim: int) -> PendingTensor:
    """Start a reduce-scatter; return a function that waits for this rank's part of the sum along `dim`.

    Communication: one reduce-scatter, of parts padded to the size of the largest.
    """
    dim = dim % summand.dim()
    cuts = divide(summand.shape[dim], group.size)
    own = cuts[group.index]
    if len(cuts[-1]) == len(cuts[0]):
        shape = *summand.shape[:dim], group.size, len(own), *summand.shape[dim + 1 :]
        mine = summand.reshape(shape).movedim(dim, 0).flatten(0, 1).contiguous()
    else:
        each = (summand.narrow(dim, cut.start, len(cut)) for cut in cuts)
        mine = torch.cat([_padded(one, dim, len(cuts[0])) for one in each])
    pending = _start_reduce_scatter(mine, group)
    if len(own) == len(cuts[0]):
        return pending
    return lambda: pending().narrow(dim, 0, len(own)).clone(memory_format=torch.contiguous_format)


def _start_reduce_scatter(mine: Tensor, group: Group) -> PendingTensor:
    """Start a reduce-scatter along dim 0."""
    if not mine.is_meta:
        return reduce_scatter(mine, group, checked=False).wait
    group.skip("reduce_scatter", mine)
    part = mine.new_empty(mine.shape[0] // group.size, *mine.shape[1:])
    return lambda: part


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """Return `part`, padded with zeros to `size` along `dim`."""
    missing = size - part.shape[dim]
    if not missing:
        return part
    zeros = part.new_zeros(*part.shape[:dim], missing, *part.shape[dim + 1 :])
    return torch.cat([part, zeros], dim)


class Regathered:
    """A tensor that is all-gathered again from the ranks' parts on first use, and then cached."""

    def __init__(self, part: Tensor, gather: Gather) -> None:
        self._part = part
        self._gather = gather
        self._pending: PendingTensor | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Start the all-gather, unless it has started; `whole` waits for it."""
        if self._pending is None:
            self._pending = self._gather.start(self._part)

    def whole(self) -> Tensor:
        """Return the whole tensor and cache it. Communication: one all-gather, on first use."""
        if self._whole is None:
            self.start()
            assert self._pending is not None
            self._whole = self._pending()
        return self._whole


@dataclass
class GatherRegistry:
    """Maps each gathered tensor (input or output gradient of a linear) to its part, to gather it again."""

    _parts: MutableMapping[Tensor, tuple[Tensor, Gather, int]] = field(
        default_factory=WeakTensorKeyDictionary
    )
    """By whole tensor: the part, the all-gather, and the version counter after it."""
    is_used: bool = False
    """Whether a tensor was ever registered or gathered again; every linear asks."""
    _regathered: MutableMapping[tuple[object, ...], Regathered] = field(default_factory=WeakValueDictionary)

    def add(self, whole: Tensor, part: Tensor, gather: Gather) -> None:
        """Register that `whole` was gathered from `part`: autograd may save `part` in its place."""
        self._parts[whole], self.is_used = (part, gather, version_of(whole)), True

    def of(self, whole: Tensor) -> tuple[Tensor, Gather] | None:
        """Return the part from which `whole` was gathered, and how; None if not known or written to since."""
        if not self.is_used:
            return None
        part, gather, version = self._parts.get(whole, (None, None, -1))
        if part is None or gather is None or version != version_of(whole):
            return None
        return part, gather

    def again(self, part: Tensor, gather: Gather) -> Regathered:
        """Return an object that all-gathers `part` again on first use; equal calls share it while in use."""
        self.is_used = True
        key = id(part.untyped_storage()), part.storage_offset(), part.shape, part.stride()
        found = self._regathered.get(key)
        if found is None:
            found = self._regathered[key] = Regathered(part.detach(), gather)
        return found


def version_of(tensor: Tensor) -> int:
    """Return the version counter, which each in-place write increases."""
    return tensor._version
