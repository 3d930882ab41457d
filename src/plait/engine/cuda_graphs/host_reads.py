"""Which operations of a segment cannot be in a graph: they read values on the host, or draw at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.ranks.device import RandomState, is_accelerator, random_state
from plait.tensor.layer_values import tensors_of

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostReads(TorchDispatchMode):
    """Context that notes the operations of which the host reads the result, and those that draw at random."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[str] = []
        """The operations that copy a result to the host, as `aten.nonzero` does the number of elements."""
        self.draws: list[str] = []
        """The operations that draw from torch's own generators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags  # so has attention, for its dropout
        before = random_state() if may_draw else None
        result = func(*args, **(kwargs or {}))
        if _is_read(func, args, kwargs or {}, result):
            self.reads.append(str(func.overloadpacket))
        if before is not None and _differ(before, random_state()):
            self.draws.append(str(func.overloadpacket))
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
