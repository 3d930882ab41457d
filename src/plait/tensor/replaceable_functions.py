"""Functions that a reference run of a verification replaces by their plain definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, Generic

from plait.tensor.position_marks import P, R

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
