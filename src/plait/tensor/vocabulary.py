"""The vocabulary as the ranks of `tp` hold it: each has the logits of a few consecutive classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from plait.comm.group import Group
from plait.errors import ModelError
from plait.layout import divide


@dataclass(frozen=True)
class Vocabulary:
    """`classes` class numbers, cut over the ranks of `group` as `divide` does: evenly or not, some empty."""

    classes: int
    group: Group

    @cached_property
    def own(self) -> range:
        """The class numbers of this rank, which are the rows of the head that it holds."""
        return divide(self.classes, self.group.size)[self.group.index]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many classes each rank of the group has."""
        return tuple(map(len, divide(self.classes, self.group.size)))

    def require_piece(self, output: Any) -> Tensor:
        """`output` as this rank's logits `[..., len(own)]`; ModelError for anything else."""
        if isinstance(output, Tensor) and output.dim() and output.shape[-1] == len(self.own):
            return output
        given = f"of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"the model's output on rank {self.group.rank} is {given}: with its head cut by vocabulary over "
            f"{self.group.name} it has to be one tensor of logits [..., {len(self.own)}], {len(self.own)} of "
            f"the {self.classes} classes, so let the head be the model's last operation."
        )
