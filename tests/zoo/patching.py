"""Mistakes of one layer, one rank, one method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from typing import Any, Literal
from unittest.mock import patch

from torch import Tensor

from plait.engine.pipeline.stage import Stage
from plait.ranks.handle import Handle
from plait.ranks.transport.process_ranks import current_ranks


def rank() -> int:
    """Return this rank's number, of a process or of a thread."""
    ranks = current_ranks()
    return 0 if ranks is None else ranks.rank


@contextmanager
def during(
    method: Literal["forward", "backward_input", "backward_weight"],
    defect: Callable[[], AbstractContextManager[object]],
    *,
    layer: str = "*",
    on_rank: int | None = None,
) -> Iterator[None]:
    """`defect` lasts only while a stage does `method` of a layer whose path is like `layer`."""
    original = getattr(Stage, method)

    def run(self: Stage, microbatch: int, number: int) -> None:
        meant = fnmatch(self.layers[number].path, layer) and on_rank in (None, rank())
        with defect() if meant else nullcontext():
            original(self, microbatch, number)

    with patch.object(Stage, method, each_alone(run)):
        yield


def each_alone(run: Callable[[Stage, int, int], None]) -> Callable[..., None]:
    """`run`, for each layer of those that an evaluation runs together: it makes no graph."""

    def run_all(self: Stage, microbatch: int, first: int, last: int | None = None) -> None:
        for number in range(first, (first if last is None else last) + 1):
            run(self, microbatch, number)

    return run_all


def replaced_all_reduce(module: Any, group_name: str, change: Callable[[Tensor, Any], Tensor]) -> Any:
    """The sums that `module` makes over groups of a name become what `change` gives."""
    original = module.all_reduce

    def all_reduce(tensor: Tensor, group: Any, *arguments: Any, **options: Any) -> Handle[Tensor]:
        if group.name == group_name:
            return Handle.done(change(tensor, group), group)
        return original(tensor, group, *arguments, **options)

    return patch.object(module, "all_reduce", all_reduce)


def in_single(tensor: Tensor) -> Tensor:
    """Rounded to float32, in its own dtype."""
    return tensor.float().to(tensor.dtype)
