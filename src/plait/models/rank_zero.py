"""The values of rank 0 on all ranks: for a model that was made, or loaded, on that rank only."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.collectives import broadcast
from plait.comm.group import Group
from plait.comm.text import broadcast_text
from plait.errors import ModelError, PlaitError
from plait.models.values import Values


class FromRankZero:
    """What rank 0 of a group reads; what the others have does not count. See `Source`.

    Reading and skipping are collective: a few bytes that tell the dtype, or what went wrong, then the tensor.
    """

    def __init__(self, values: Values, group: Group, device: torch.device) -> None:
        """`device`: of this rank, where tensors travel."""
        self._values = values
        self._group = group
        self._device = device

    def read(self, name: str) -> Tensor:
        """The whole tensor on this rank's device. Where rank 0 fails so do all, the others by ModelError."""
        value, failure, news = None, None, ""
        if self._group.index == 0:
            try:
                value = self._values.read(name).to(self._device).contiguous()
                news = str(value.dtype)
            except Exception as raised:  # of any kind: the others wait
                failure, news = raised, _told(name, raised)
        news = broadcast_text(news, self._group, self._device)
        if failure is not None:
            raise failure
        if value is None:
            dtype = getattr(torch, news.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ModelError(news)
            value = torch.empty(self._values.places[name].tensor.shape, dtype=dtype, device=self._device)
        return broadcast(value, self._group, checked=False).wait()

    def skip(self, name: str) -> None:
        """Take part, and let go."""
        self.read(name)


def _told(name: str, failure: Exception) -> str:
    if isinstance(failure, PlaitError):
        return f"rank 0 refuses: {failure}"
    return f"rank 0 cannot read {name} ({type(failure).__name__}: {failure}): see what it has there."
