"""Argument parser of the commands, whose errors are `ConfigError`s, their help, and readers of values."""

from __future__ import annotations

import json
import re
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Container, Mapping, Sequence
from io import StringIO
from itertools import groupby, islice
from math import isfinite, isnan, nan
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.app.config.config_parser import allowed_values_text, fields, sections
from plait.errors import ConfigError

_HELP = ("--help", "-h")


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
        """Add the parser of the action (subcommand) `name` and return it; parsed arguments have `.action`."""
        if self._choice is None:
            self._choice = self.add_subparsers(
                dest="action", metavar="ACTION", required=True, prog=self.prog, parser_class=type(self)
            )
        self.actions[name] = self._choice.add_parser(name, help=summary, **options)
        self._summaries.append((name, summary))
        return self.actions[name]

    def require_together(self, options: Namespace, belongs_to: Mapping[str, str]) -> None:
        """Raise ConfigError where an option in `belongs_to` was given, but not the option it belongs to."""
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
    """Return one line per pair: both texts, with all second texts aligned."""
    return "\n".join(f"  {line}" for line in aligned(rows, left=(0, 1)))


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> list[str]:
    """Return a line for each row: the columns `left` are aligned to the left, the others to the right."""
    padded = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        padded.append([cell.ljust(width) if number in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def count(text: str) -> int:
    """Return the whole number, at least 1, that `text` spells."""
    if not text.isdecimal() or len(text) > 100 or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number(text: str) -> float:
    """Return the finite number that `text` spells, as an int unless it has a point or an exponent."""
    value = number_or_inf(text)
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def number_or_inf(text: str) -> float:
    """Return the number that `text` spells, or infinity, as an int unless it has a point or exponent."""
    try:
        value = float(text)
        value = int(text) if text.lstrip("+-").isdecimal() and isfinite(value) else value
    except (ValueError, OverflowError):
        value = nan
    if isnan(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether `--help` or `-h` is among the arguments."""
    return any(option in argv for option in _HELP)


def help_text(parser: CommandParser, argv: Sequence[str]) -> str:
    """Return the help that `argv` asks for: of the command, its action, or sections of the configuration."""
    words = [word for word in argv if word not in _HELP]
    if words and words[0] in parser.actions:
        return help_text(parser.actions[words[0]], words[1:])
    asked = [name for name in sections() if name in words or "all" in words]
    if parser.takes_configuration and asked:
        return "\n".join(_described(section) for section in asked)
    return parser.format_help()


def configuration_overview() -> str:
    """Return a text that lists all configuration fields by section, and says how to read about them."""
    lines = ["Fields; `plait train --help SECTION`, or `--help all`, describes them:"]
    for section in sections():
        own = [name.removeprefix(f"{section}.") for name in fields() if name.startswith(f"{section}.")]
        text = fill(
            ", ".join(_with_common_prefixes(own)),
            78,
            initial_indent=f"  {section:<10}",
            subsequent_indent=" " * 12,
        )
        lines += ["", text]
    return "\n".join(lines)


def _with_common_prefixes(names: Sequence[str]) -> list[str]:
    """Return the names, with consecutive ones of one section joined: `lora.{rank, alpha}`."""
    found = []
    for prefix, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        rest = [name.rpartition(".")[2] for name in group]
        found += [f"{prefix}.{{{', '.join(rest)}}}"] if prefix else rest
    return found


def _described(section: str) -> str:
    """Return a section's fields as a table: option, meaning, values and default."""
    written = StringIO()
    console = Console(file=written, markup=False, highlight=False, width=get_terminal_size().columns)
    console.print(f"[{section}] {sections()[section]['description']}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, field in fields().items():
        if name.startswith(f"{section}."):
            default = json.dumps(field["default"]).replace("null", "none")
            about = f"{field['description']} ({allowed_values_text(field)}; default {default})"
            table.add_row(f"  --{name}", Text(about))
    console.print(table)
    return written.getvalue()


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the command's own and the configuration's, such as `--config FILE`."""
    own: list[str] = []
    of_run: list[str] = []
    words = iter(argv)
    for word in words:
        if not re.match(r"--(config\b|\w+\.)", word):
            own.append(word)
            continue
        of_run.append(word)
        if "=" not in word:
            of_run += islice(words, 1)
    return own, of_run
