"""Measures the optimizer state of any optimizer class for one parameter, by steps of a single tensor.

Steps run on the meta device, where tensors have no memory; a class that needs values takes them on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from plait.errors import PlanError
from plait.optimizers.flattened_state import flat_state
from plait.ranks.accelerator import keep_random_state

STEPS = 2
"""Some classes allocate a part of their state in the second step."""
MOST_ON_CPU = 1 << 22
"""Elements of the largest parameter of which steps run on the CPU: some classes decompose matrices."""
_NUMBERS: Mapping[Callable[..., Any], Any] = {
    Tensor.item: 1.0,
    Tensor.__float__: 1.0,
    Tensor.__int__: 1,
    Tensor.__bool__: True,
}


class NumbersOfMeta(TorchFunctionMode):
    """Mode in which reading a number from a tensor on the meta device gives 1, instead of an error."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return 1 where `func` reads a number from a tensor on meta, else what `func` returns."""
        if func in _NUMBERS and args[0].is_meta:
            return _NUMBERS[func]
        return func(*args, **(kwargs or {}))


def measured_state(
    kind: type[Optimizer], settings: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Return the bytes of the state that an optimizer of class `kind` keeps for one parameter.

    Raises PlanError where the class steps neither on the meta device nor, because the parameter is large, on
    the CPU.
    """
    try:
        with NumbersOfMeta():
            return _after_steps(kind, settings, torch.empty(tuple(shape), dtype=dtype, device="meta"))
    except Exception as failure:  # of any kind: it needs values
        if torch.Size(shape).numel() > MOST_ON_CPU:
            reason = f"{type(failure).__name__}: {failure}".partition("\n")[0]
            raise PlanError(
                f"the state of {kind.__name__} for a parameter {list(shape)} cannot be measured on the meta "
                f"device ({reason}): give moments a number of tensors of a parameter's size."
            ) from failure
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return _after_steps(kind, settings, values)


def _after_steps(kind: type[Optimizer], settings: Mapping[str, Any], values: Tensor) -> int:
    """Return the bytes of the state after steps with a parameter, and gradients, of these `values`."""
    parameter = nn.Parameter(values)
    with warnings.catch_warnings(), keep_random_state(torch.device("cpu")):
        warnings.simplefilter("ignore")
        optimizer = kind([parameter], **settings)
        for _ in range(STEPS):
            parameter.grad = values.clone()
            optimizer.step()
    state = flat_state(optimizer.state[parameter])
    return sum(one.nbytes for one in state.values() if isinstance(one, Tensor))
