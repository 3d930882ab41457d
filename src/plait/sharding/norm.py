"""The norm of all gradients of the model, and clipping by it. Each parameter counts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from plait.comm.collectives import all_reduce
from plait.comm.group import Group
from plait.sharding.unit import Unit

ROW = 1024
"""Elements whose squares are added up in float32."""


def total_norm(units: Iterable[Unit], counted: Collection[str], group: Group, device: torch.device) -> Tensor:
    """The L2 norm over the gradients of the `counted` parameters of all ranks of `group`, 0-d float64.

    Communication: one all-reduce of 8 bytes over `group` (`pp` and `tp`). A parameter, or a piece of one,
    that several ranks of the group hold has to be counted by one of them only.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for unit in units:
        for gradient in _gradients(unit, counted):
            squares += _squares(gradient)
    return all_reduce(squares, group, checked=False).wait().sqrt()


def scale_to(units: Iterable[Unit], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`; smaller ones stay as they are."""
    # The same small number as torch.nn.utils.clip_grad_norm_, so that results are equal.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # A norm that is no number would spread to every gradient and hide where it began.
    factor = torch.where(norm.isfinite(), factor, 1.0)
    for unit in units:
        for gradient in _gradients(unit, unit.parameters):
            gradient.mul_(factor.to(gradient.dtype))


def _squares(gradient: Tensor) -> Tensor:
    """The sum of squares, 0-d float64.

    In rows: a CPU adds squares up in float32 one after the other, which over the elements of a large layer
    loses three digits; over a row it loses none to speak of, and takes no longer.
    """
    wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    flat = gradient.reshape(-1)
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=wide)
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def _gradients(unit: Unit, wanted: Collection[str]) -> list[Tensor]:
    return [gradient for buffer in unit.buffers for gradient in buffer.current_gradients(wanted)]
