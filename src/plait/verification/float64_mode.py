"""Float64 throughout: casts of float64 tensors to narrower formats keep float64.

Models of transformers compute norms, and some a softmax, in float32 whatever the model's dtype. Where the
order of sums differs in the last bit of float64, such a cast may differ in the last bit of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.tensor.autograd.engine_calls import run_backward_unseen

NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Float64Mode(TorchFunctionMode):
    """Context in which operations on float64 tensors give float64, also where they ask for less."""

    narrow = False
    """Whether a tensor that depends on parameters was narrower all the same."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.autograd.backward and len(args) == 2:  # which may run layers again
            with self:
                return run_backward_unseen(*args)
        wide = any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in args)
        if wide and func in _CASTS:
            return args[0]
        if wide:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad and result.dtype in NARROW:
            self.narrow = True
        return result


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument
