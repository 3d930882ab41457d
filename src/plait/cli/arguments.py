"""Argument parser of the commands, whose errors are `ConfigError`s, and readers of option values."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from math import isfinite, isnan, nan
from typing import NoReturn

from plait.errors import ConfigError


class CommandParser(ArgumentParser):
    """Argument parser of `plait COMMAND`. Raises ConfigError where `ArgumentParser` would exit."""

    def __init__(self, command: str, about: str, usage: str | None = None) -> None:
        super().__init__(
            f"plait {command}",
            usage=usage,
            description=about,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with `message`."""
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


def count(text: str) -> int:
    """Return the whole number, at least 1, that `text` spells."""
    if not text.isdecimal() or len(text) > 100 or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number(text: str) -> float:
    """Return the finite number that `text` spells, as an int if it consists of digits and a sign."""
    value = number_or_inf(text)
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def number_or_inf(text: str) -> float:
    """Return the number that `text` spells, infinity too; as an int if it consists of digits and a sign."""
    try:
        value = float(text)
        value = int(text) if text.lstrip("+-").isdecimal() and isfinite(value) else value
    except (ValueError, OverflowError):
        value = nan
    if isnan(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value
