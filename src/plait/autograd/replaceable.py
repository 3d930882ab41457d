"""Functions of plait that a verification's reference run replaces by their definitions.

They are those decorated by `replaceable` and those of `plait.autograd.position_marks`.

Layers call such functions by name, so that a run which is to compute something in another way, and not in
another model, says which functions it replaces, for as long as its layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Replacements = Mapping[Callable[..., Any], Callable[..., Any]]
"""What is called in place of each function that `replaceable` returned."""

REPLACEMENTS: ContextVar[Replacements | None] = ContextVar("plait_replacements", default=None)


def replaceable(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which within `replacing` may be another."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        replacements = REPLACEMENTS.get()
        if replacements is None or call not in replacements:
            return function(*args, **kwargs)
        result: R = replacements[call](*args, **kwargs)
        return result

    return call


@contextmanager
def replacing(replacements: Replacements) -> Iterator[None]:
    """Within the context, calls of the `replaceable` functions in `replacements` are calls of others."""
    token = REPLACEMENTS.set(replacements)
    try:
        yield
    finally:
        REPLACEMENTS.reset(token)
