"""Argument parser of the commands, whose errors are `ConfigError`s, and readers of option values."""

from __future__ import annotations

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import ConfigError


class CommandParser(ArgumentParser):
    """Argument parser of a command. Raises ConfigError where `ArgumentParser` would exit.

    `examples` are pairs of a command line and what it does, printed at the end of the help. A parser that
    `takes_configuration` passes on `--config FILE` and `--section.field VALUE`, which are not its own.
    """

    def __init__(
        self,
        prog: str,
        *,
        examples: Sequence[tuple[str, str]] = (),
        takes_configuration: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            prog,
            epilog=f"examples:\n{two_columns(examples)}" if examples else None,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **options,
        )
        self.takes_configuration = takes_configuration
        self.actions: dict[str, CommandParser] = {}
        self._summaries: list[tuple[str, str]] = []
        self._choice: Any = None

    def add_action(self, name: str, summary: str, **options: Any) -> CommandParser:
        """Return the new parser of an action, which the first argument names: `.action` once it is parsed."""
        if self._choice is None:
            self._choice = self.add_subparsers(
                dest="action",
                metavar="ACTION",
                required=True,
                prog=self.prog,
                parser_class=type(self),
            )
        self.actions[name] = self._choice.add_parser(name, help=summary, **options)
        self._summaries.append((name, summary))
        return self.actions[name]

    def require_together(self, options: Namespace, belongs_to: Mapping[str, str]) -> None:
        """Raise ConfigError for an option with a value of its own without the option that it belongs to."""
        for name, other in belongs_to.items():
            is_given = getattr(options, name) != self.get_default(name)
            if is_given and getattr(options, other) == self.get_default(other):
                raise ConfigError(f"--{name} goes with --{other}: add that, or leave --{name} out.")

    def path_arguments(self) -> list[Action]:
        """Return the arguments whose values are paths."""
        return [argument for argument in self._actions if argument.type is Path]

    def format_help(self) -> str:
        """Return the help: usage, description, and the options or the actions."""
        if not self.actions:
            return super().format_help()
        listed = f"actions:\n{two_columns(self._summaries)}"
        return (
            f"usage: {self.prog} ACTION [options]\n\n{self.description}\n\n{listed}\n\n"
            f"`{self.prog} ACTION --help` describes an action and its options.\n"
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with `message`."""
        raise ConfigError(f"{message}; see `{self.prog} --help`.")


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return a line for each pair: the first text, padded, and the second."""
    width = max(len(first) for first, _ in rows)
    return "\n".join(f"  {first:<{width}}  {second}".rstrip() for first, second in rows)


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
