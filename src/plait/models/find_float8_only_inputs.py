"""Finds the inputs of a layer's tensor-parallel regions that only float8 linears read.

Such an input is gathered from the ranks' parts of the sequence in eight bits; one that another operation
reads too, such as an adapter, a router or a residual connection, is gathered in the plan's precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.models.choose_float8_linears import RunningLinears
from plait.tensor.autograd.float8_inputs import CastInputs
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.parallel.linear import RegionBoundary


def read_by_float8_only(
    layer: NamedLayer, linears: Collection[str], value: Value, length: int
) -> tuple[bool, ...]:
    """Return for each tensor-parallel region in `layer` whether only float8 `linears` read its input.

    The regions are in the order in which it enters them. `linears`: names, in the layer, of those in float8.
    `layer` has its rules applied, is on the meta device, and is changed: give a copy. `value` and `length`:
    as to `NamedLayer.run`. Empty where it enters none, or does not run.
    """
    reads = _RegionReads()
    for module in layer.module.modules():
        boundary = getattr(module, "boundary", None)
        if isinstance(boundary, RegionBoundary):
            boundary.inputs = reads.inputs
    for linear in dict.fromkeys(map(layer.module.get_submodule, linears)):
        linear.forward = partial(reads.linears.run, linear.forward)
    try:
        with torch.device("meta"), torch.enable_grad(), reads:
            output, _ = layer.run(map_tensors(Tensor.clone, value), length)
    except Exception:  # the layer's own run on meta says why
        return ()
    returned = {id(one.untyped_storage()) for one in tensors_of(output)}
    return tuple(id(one.untyped_storage()) not in reads.found | returned for one in reads.inputs.entered)


class _EnteredInputs(CastInputs):
    """Records the inputs of regions, in order."""

    def __init__(self, found: set[int]) -> None:
        super().__init__()
        self.entered: list[Tensor] = []
        self._found = found

    def enter(self, input: Tensor, *others: Any) -> None:
        """Record the input of a region, and drop reads of it that happened while it was made."""
        self.entered.append(input)
        self._found.discard(id(input.untyped_storage()))


class _RegionReads(TorchDispatchMode):
    """Records which inputs of regions an operation reads while no linear in float8 runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()
        """The ids of the storages that are read."""
        self.inputs = _EnteredInputs(self.found)
        self.linears = RunningLinears()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and record the inputs that it reads."""
        kwargs = kwargs or {}
        if not self.linears.running:
            given = tensors_of([list(args), list(kwargs.values())])
            self.found.update(id(one.untyped_storage()) for one in given)
        return func(*args, **kwargs)
