"""The vocabulary, partitioned over `tp`: each rank has the logits of consecutive classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from plait.errors import ModelError
from plait.plan.layout.layout import divide
from plait.ranks.group import Group
from plait.ranks.traffic import Traffic


@dataclass(frozen=True)
class Vocabulary:
    """The `classes` of the logits, partitioned over `group` by `layout.divide`; a rank may have none."""

    classes: int
    group: Group

    @staticmethod
    def of_one_rank(classes: int) -> Vocabulary:
        """Return the vocabulary of logits of all classes, over a group of one rank."""
        return Vocabulary(classes, Group("tp", (0,), 0, None, Traffic(), 0.0))

    @cached_property
    def own(self) -> range:
        """This rank's class numbers: the indices of its rows of the last linear's weight."""
        return divide(self.classes, self.group.size)[self.group.index]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each rank of the group."""
        return tuple(map(len, divide(self.classes, self.group.size)))

    def require_piece(self, output: Any) -> Tensor:
        """Return `output` if it is this rank's logits `[..., len(own)]`, else raise ModelError."""
        if isinstance(output, Tensor) and output.dim() and output.shape[-1] == len(self.own):
            return output
        given = f"of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"the model's output on rank {self.group.rank} is {given}: with its head partitioned by "
            f"vocabulary over {self.group.name} it has to be one tensor of logits [..., {len(self.own)}], "
            f"{len(self.own)} of the {self.classes} classes, so make the head the model's last operation."
        )
