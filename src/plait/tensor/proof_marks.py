"""Marks that proofs and verification read: on functions, and on nodes of an autograd graph.

A function that may mix positions exchanges data between the ranks that hold a sequence, or returns values for
the positions of this rank. `plait.proof.position_proof` does not look at the operations inside: by the
protocol of `torch.overrides` it sees, as a `TorchFunctionMode`, where a call begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor
from torch.autograd.graph import Node
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


def tag(result: Tensor, key: str, value: object) -> Tensor:
    """Return `result`; on the meta device, also store `value` under `key` on its autograd node."""
    if result.is_meta and result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata  # a dictionary, typed as a method
        metadata[key] = value
    return result


def tag_of(node: Node, key: str) -> Any:
    """Return the value that `tag` stored under `key` on an autograd node, or None."""
    metadata: Any = node.metadata
    return metadata.get(key)


Replacements = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called in place of each `Replaceable` function."""
_REPLACEMENTS: ContextVar[Replacements | None] = ContextVar("plait_replacements", default=None)


class Replaceable(Generic[P, R]):
    """Decorator of a function that `replacing` can replace by its plain definition, for a reference run.

    Layers call such functions by name, so that a run which is to compute something in another way, and not in
    another model, says which functions it replaces, for as long as its layers run.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        """`function` becomes `original`, which is never replaced."""
        update_wrapper(self, function)
        self.original = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, or its replacement."""
        replacements = _REPLACEMENTS.get()
        if replacements is None or self not in replacements:
            return self.original(*args, **kwargs)
        result: R = replacements[self](*args, **kwargs)
        return result

    def __reduce__(self) -> str:
        """Return the function's name, by which pickle stores it, as it stores every function."""
        return self.original.__qualname__


@contextmanager
def replacing(replacements: Replacements) -> Iterator[None]:
    """Context in which each `Replaceable` function in `replacements` calls the function it is mapped to."""
    token = _REPLACEMENTS.set(replacements)
    try:
        yield
    finally:
        _REPLACEMENTS.reset(token)
