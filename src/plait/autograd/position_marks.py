"""Marks for functions that handle the positions of a sequence as context parallelism requires.

Such a function exchanges data between the ranks that hold a sequence, or returns values for the positions
of this rank. `plait.layers.position_proof` does not look at the operations inside. It notices the call
by the protocol of `torch.overrides`, which shows calls of marked functions to modes of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
_MARK = "plait_position_mark"


@dataclass(frozen=True)
class PositionMark:
    """In which dims a marked function takes and returns positions."""

    dim: int | None = None
    """The sequence dim of `arguments` and results; None: in results, the dim whose size shows it."""
    arguments: tuple[str, ...] = ()
    """The names of arguments that must have positions in `dim`."""


def positions_may_mix(dim: int, *arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that marks a function which combines positions of a sequence.

    `dim` is the sequence dim of the tensors that it returns, and of its arguments named in `arguments`; other
    arguments may be anything.
    """
    return lambda function: _marked(function, PositionMark(dim, arguments))


def gives_positions(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, marked as one that returns values for the positions that this rank holds.

    Such are position numbers, rotary angles or dropout masks. Each result has at most one dim with positions.
    """
    return _marked(function, PositionMark())


def mark_of(function: object) -> PositionMark | None:
    """Return the mark of a function, or None."""
    mark: PositionMark | None = getattr(function, _MARK, None)
    return mark


def _marked(function: Callable[P, R], mark: PositionMark) -> Callable[P, R]:
    @wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        # None stands for the tensors, which some of these functions do not take: only modes are asked.
        if has_torch_function((None,)):
            result: R = handle_torch_function(marked, (None,), *args, **kwargs)
            return result
        return function(*args, **kwargs)

    setattr(marked, _MARK, mark)
    return marked
