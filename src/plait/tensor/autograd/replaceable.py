"""Functions of plait that a verification's reference run replaces by their definitions.

Layers call such functions by name, so that a run which is to compute something in another way, and not in
another model, says which functions it replaces, for as long as its layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Replacements = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called in place of each function that `replaceable` returned."""

_REPLACEMENTS: ContextVar[Replacements | None] = ContextVar("plait_replacements", default=None)


class Replaceable(Generic[P, R]):
    """A function whose calls go to another function within the context `replacing`."""

    def __init__(self, function: Callable[P, R]) -> None:
        """`function` becomes `original`, which is never replaced."""
        update_wrapper(self, function)
        self.original = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, or what replaces it."""
        replacements = _REPLACEMENTS.get()
        if replacements is None or self not in replacements:
            return self.original(*args, **kwargs)
        result: R = replacements[self](*args, **kwargs)
        return result

    def __reduce__(self) -> str:
        """Pickle by name, as a function is."""
        return self.original.__qualname__


def replaceable(function: Callable[P, R]) -> Replaceable[P, R]:
    """Return a wrapper of `function` whose calls the context `replacing` can redirect to another function."""
    return Replaceable(function)


@contextmanager
def replacing(replacements: Replacements) -> Iterator[None]:
    """Within the context, call for each `replaceable` function in `replacements` the one it is mapped to."""
    token = _REPLACEMENTS.set(replacements)
    try:
        yield
    finally:
        _REPLACEMENTS.reset(token)
