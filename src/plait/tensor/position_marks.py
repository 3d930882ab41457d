"""Marks on functions that tell a proof how they treat the positions of a sequence.

A function that may mix positions exchanges data between the ranks that hold a sequence, or returns values for
the positions of this rank. `plait.proof.position_proof` does not look at the operations inside: by the
protocol of `torch.overrides` it sees, as a `TorchFunctionMode`, where a call begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")
_ASK_MODES = (None,)
"""In place of the tensors that the protocol asks about: modes see calls without tensors, too."""


@dataclass(frozen=True)
class PositionMark:
    """The dim of sequence positions in arguments and results of a function that is marked for proofs."""

    dim: int | None = None
    """The sequence dim of `arguments` and results; None: in results, the dim whose size shows it."""
    arguments: tuple[str, ...] = ()
    """The names of arguments that must have positions in `dim`."""
    like: str | None = None
    """The argument that has its positions where the result has them."""


@dataclass
class MarkedCall:
    """A call of a function that is marked for proofs, with its arguments and result."""

    mark: PositionMark
    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    result: object = None
    """Set when the call ends, unless by an error."""


def positions_may_mix(dim: int, *arguments: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that marks a function which may combine sequence positions, so that proofs allow it.

    `dim` is the sequence dim of the tensors that it returns, and of its arguments named in `arguments`; other
    arguments may be anything.
    """
    return lambda function: _marked(function, PositionMark(dim, arguments))


def gives_positions(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, marked for proofs as one whose result has a value for each of this rank's positions.

    Such are position numbers, rotary angles or dropout masks. Each result has at most one dim with positions.
    """
    return _marked(function, PositionMark())


def keeps_positions_later(
    argument: str,
) -> Callable[[Callable[P, Callable[[], R]]], Callable[P, Callable[[], R]]]:
    """Return a decorator: the function and the function it returns keep the rows of `argument` apart.

    The function starts work, and what it returns finishes it. Together they compute each row of the result
    from that row of `argument` only, though their operations look as if they mixed rows: they sort them, say,
    and undo that. What runs in between is looked at.
    """

    def decorator(function: Callable[P, Callable[[], R]]) -> Callable[P, Callable[[], R]]:
        start = _marked(function, PositionMark())

        @wraps(function)
        def started(*args: P.args, **kwargs: P.kwargs) -> Callable[[], R]:
            finish = start(*args, **kwargs)
            if not has_torch_function(_ASK_MODES):
                return finish
            return partial(_called, MarkedCall(PositionMark(like=argument), function, args, kwargs), finish)

        return started

    return decorator


def call_begins(call: MarkedCall) -> None:
    """Do nothing; torch's function modes see this call as the beginning of a marked function."""
    if has_torch_function(_ASK_MODES):
        handle_torch_function(call_begins, _ASK_MODES, call)


def call_ends(call: MarkedCall) -> None:
    """Do nothing; torch's function modes see this call as the end of a marked function."""
    if has_torch_function(_ASK_MODES):
        handle_torch_function(call_ends, _ASK_MODES, call)


def _marked(function: Callable[P, R], mark: PositionMark) -> Callable[P, R]:
    @wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not has_torch_function(_ASK_MODES):  # kept cheap: layers call such functions
            return function(*args, **kwargs)
        return _called(MarkedCall(mark, function, args, kwargs), partial(function, *args, **kwargs))

    return marked


def _called(call: MarkedCall, compute: Callable[[], R]) -> R:
    """Return `compute()`, between the calls that torch's function modes see."""
    call_begins(call)
    try:
        result = call.result = compute()
        return result
    finally:
        call_ends(call)
