"""Checks of arguments of public functions: a value of another type, or out of range, is refused by name.

Python takes True for 1, and any value wherever it does not fail, so that a mistake would mean something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike

from plait.errors import ConfigError, PlaitError

Kind = type[PlaitError]


def whole(name: str, value: object, kind: Kind = ConfigError, *, least: int = 1) -> int:
    """Return `value`, a Python or NumPy integer of at least `least`, as an int; else raise a `kind` error."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
    require_whole(name, number, kind, least=least)
    assert isinstance(number, int)
    return number


def require_whole(name: str, value: object, kind: Kind = ConfigError, *, least: int = 1) -> None:
    """Raise an error of class `kind` unless `value` is an int of at least `least`."""
    if isinstance(value, Integral) and not isinstance(value, int) and int(value) >= least:
        raise kind(f"{name} is {value!r}, a number of {type(value).__module__}: give int(…) of it.")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise kind(f"{name} is {value!r}: give a whole number of at least {least}.")


def require_number(
    name: str, value: object, kind: Kind = ConfigError, *, positive: bool = False, infinite: str = ""
) -> None:
    """Raise an error of class `kind` unless `value` is finite, and at least 0 (above 0 if `positive`).

    `infinite`: what infinity means, where it is allowed.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    in_range = number > 0 or (number == 0 and not positive)
    if not in_range or (math.isinf(number) and not infinite):
        least = "above 0" if positive else "of at least 0"
        way = f", or math.inf for {infinite}" if infinite else ""
        raise kind(f"{name} is {value!r}: give a number {least}{way}.")


def require_flag(name: str, value: object, kind: Kind = ConfigError) -> None:
    """Raise an error of class `kind` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise kind(f"{name} is {value!r}: give True or False.")


def require_path(name: str, value: object, kind: Kind = ConfigError) -> None:
    """Raise an error of class `kind` unless `value` is a path: text that is not empty, or a `Path`."""
    if not isinstance(value, str | PathLike) or not str(value) or "\0" in str(value):
        raise kind(f"{name} is {value!r}: give a path, as text or as a pathlib.Path.")


def require_choice(
    name: str, value: object, choices: Sequence[str], kind: Kind = ConfigError, *, also: str = ""
) -> None:
    """Raise an error of class `kind` unless `value` is in `choices`; `also`: others, for the message."""
    if value not in choices:
        near = get_close_matches(str(value).lower(), choices, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {also}{', '.join(choices)}."
        raise kind(f"{name} is {value!r}: {remedy}")


def require_instance(
    name: str, value: object, of: type | tuple[type, ...], remedy: str, kind: Kind = ConfigError
) -> None:
    """Raise an error of class `kind`, which ends with `remedy`, unless `value` is an instance of `of`."""
    if not isinstance(value, of):
        what = (
            f"the class {value.__name__}"
            if isinstance(value, type)
            else f"an object of {type(value).__name__}"
        )
        raise kind(f"{name} is {what}: {remedy}.")
