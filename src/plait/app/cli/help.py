"""The help of a command: its parser's, or the fields of the configuration that it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from io import StringIO
from shutil import get_terminal_size
from textwrap import fill

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.app.cli.arguments import CommandParser
from plait.app.config.config_parser import fields, sections, takes

_HELP = ("--help", "-h")
_ALL = "all"


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether `--help` or `-h` is among the arguments."""
    return any(option in argv for option in _HELP)


def help_text(parser: CommandParser, argv: Sequence[str]) -> str:
    """Return the help that `argv` asks for: that of the command, or of the action that it names.

    A command that takes the configuration describes the fields of `--help SECTION`, or of `--help all`.
    """
    words = [word for word in argv if word not in _HELP]
    if words and words[0] in parser.actions:
        return help_text(parser.actions[words[0]], words[1:])
    asked = [name for name in sections() if name in words or _ALL in words]
    if parser.takes_configuration and asked:
        return "\n".join(_described(section) for section in asked)
    return parser.format_help()


def configuration_overview(command: str) -> str:
    """Return the names of all fields of the configuration by section, and how to see what they mean."""
    lines = [
        f"Fields by section; `{command} --help SECTION` describes those of one,",
        f"`{command} --help {_ALL}` all:",
    ]
    for section in sections():
        lines += ["", *_names(section).splitlines()]
    return "\n".join(lines)


def _names(section: str) -> str:
    names = ", ".join(name for name in fields() if name.startswith(f"{section}."))
    return fill(
        names.replace(f"{section}.", ""), 78, initial_indent=f"  {section:<10}", subsequent_indent=" " * 12
    )


def _described(section: str) -> str:
    """Return a section's fields as a table: option, meaning, values and default."""
    written = StringIO()
    console = Console(file=written, markup=False, highlight=False, width=get_terminal_size().columns)
    console.print(f"[{section}] {sections()[section]['description']}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, about in _options(section):
        table.add_row(f"  --{name}", about)
    console.print(table)
    return written.getvalue()


def _options(section: str) -> Iterator[tuple[str, Text]]:
    for name, field in fields().items():
        if name.startswith(f"{section}."):
            default = json.dumps(field["default"]).replace("null", "none")
            yield name, Text(f"{field['description']} ({takes(field)}; default {default})")
