"""Finds operations of a segment that a graph cannot have: reads of values on the host, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.ranks.accelerator import RandomState, is_accelerator, random_state
from plait.tensor.autograd.private_torch_functions import run_backward_unseen
from plait.tensor.nested_values import tensors_of

_READING = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostReads:
    """Context that records operations whose result the host reads, and those that draw random numbers."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        """The operations that copy a result to the host, as `aten.nonzero` does the number of elements."""
        self.draws: list[str] = []
        """The operations that draw from torch's own generators."""
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_CallReads(self))
        self._modes.enter_context(_OperationReads(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _CallReads(TorchFunctionMode):
    """Notes calls that read a whole tensor in CPU memory, which are no operations there."""

    def __init__(self, notes: HostReads) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward and len(args) == 2 and not kwargs:  # of `run_backward`
            with self:  # torch leaves a mode for what it handles
                run_backward_unseen(*args)
            return None
        if func in _READING:
            self._notes.reads.append(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _OperationReads(TorchDispatchMode):
    """Notes the operations below autograd."""

    def __init__(self, notes: HostReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags  # so has attention, for its dropout
        before = random_state() if may_draw else None
        result = func(*args, **(kwargs or {}))
        if _is_read(func, args, kwargs or {}, result):
            self._notes.reads.append(str(func.overloadpacket))
        if before is not None and _differ(before, random_state()):
            self._notes.draws.append(str(func.overloadpacket))
        return result


def _differ(before: RandomState, after: RandomState) -> bool:
    pairs = zip(before, after, strict=True)
    return any(one is not None and other is not None and not one.equal(other) for one, other in pairs)


def _is_read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:  # its tag is that of indexing by a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if any(tag in func.tags for tag in _READS):
        return True
    given = [one for one in (*tensors_of(list(args)), *tensors_of(list(kwargs.values()))) if one.dim()]
    if not any(map(is_accelerator, given)):
        return False
    made = tensors_of(result) if isinstance(result, Tensor | tuple | list) else ()
    return any(not is_accelerator(one) for one in made)
