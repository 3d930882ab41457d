"""Checks that layers and the loss depend on their arguments alone, and on no tensor kept in a global.

On one rank that may work. Where layers run on several ranks, for several micro-batches in turn, the tensor is
that of another micro-batch, or of a trial run, or is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from plait.errors import ModelError
from plait.models.layers.carried_values import other_leaf
from plait.tensor.layer_values import Value, map_tensors, tensors_of
from plait.tensor.losses import Loss

PASS_IT_ON = (
    "as an auxiliary loss that a layer keeps in a global or in an attribute: let the layers pass it on, "
    "beside their output"
)
SAME = 64.0
"""Difference of two totals of the same loss, in machine epsilons, at most."""


def require_no_hidden_input(what: str, results: Value, given: Iterable[Node], own: Iterable[Tensor]) -> None:
    """Raise ModelError if `results` have a gradient for a leaf that is not among `own` parameters.

    `given`: the nodes of the arguments, beyond which the graph is not followed.
    """
    leaf = other_leaf(tensors_of(results), own, given)
    if leaf is not None:
        raise ModelError(
            f"{what} depends on a tensor {list(leaf.shape)} that it is not given and that is no "
            f"parameter of its own, {PASS_IT_ON}."
        )


def require_function_of_output(loss: Loss, total: Tensor, output: Value, targets: Value) -> None:
    """Raise ModelError unless `total`, just computed by the loss, depends on `output` and `targets` alone."""
    with torch.enable_grad():
        copies = map_tensors(lambda one: one.detach().clone().requires_grad_(one.requires_grad), output)
        try:
            again = loss.total(copies, targets)
        except Exception as error:  # of a user's loss
            raise ModelError(
                f"the loss, called again with the same output and targets, fails with "
                f"{type(error).__name__}: it depends on something else, {PASS_IT_ON}, and add it in the loss."
            ) from error
    require_no_hidden_input("the loss", again, (), (*tensors_of(copies), *_parameters_of(loss)))
    again = again.detach()
    apart, size = float((again - total).abs()), float(total.abs())
    if apart > SAME * torch.finfo(total.dtype).eps * size:
        raise ModelError(
            f"the loss is {float(total):.6g}, and called again with the same output and targets "
            f"{float(again):.6g}: it depends on something else, {PASS_IT_ON}, and add it in the loss."
        )


def _parameters_of(loss: Loss) -> Iterator[Tensor]:
    """Yield the parameters of a loss, and of the modules that are its attributes."""
    for part in (loss, *getattr(loss, "__dict__", {}).values()):
        if isinstance(part, nn.Module):
            yield from part.parameters()


def require_values(what: str, tensor: Tensor) -> None:
    """Raise ModelError for a tensor on the meta device, which has no values."""
    if tensor.is_meta:
        raise ModelError(
            f"{what} is computed from a tensor on the meta device, left by a trial run of a layer, "
            f"{PASS_IT_ON}."
        )
