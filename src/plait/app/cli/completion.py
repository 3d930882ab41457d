"""`plait completion`: print a script that completes commands, options and values in a shell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import shtab

from plait.app.cli.arguments import CommandParser
from plait.app.cli.main import COMMANDS, command_module
from plait.app.config.config_parser import Schema, fields

_ABOUT = "Prints a script that completes the commands of plait, their options and values."
_SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = (
    ('eval "$(plait completion bash)"', "in ~/.bashrc"),
    ('eval "$(plait completion zsh)"', "in ~/.zshrc"),
    ("plait completion fish | source", "in ~/.config/fish/config.fish"),
)


def parser() -> CommandParser:
    """Return the parser of `plait completion`."""
    made = CommandParser("plait completion", description=_ABOUT, examples=_EXAMPLES)
    made.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    return made


def run(argv: Sequence[str]) -> int:
    """Print the completion script of the shell that `argv` names; return 0. ConfigError for other shells."""
    shell = parser().parse_args(argv).shell
    print(shtab.complete(command_line(), shell))
    return 0


def command_line() -> CommandParser:
    """Return a parser of the whole command line: all commands, actions, options and configuration fields."""
    made = CommandParser("plait")
    for name, summary in COMMANDS.items():
        own: CommandParser = command_module(name).parser()
        for with_options in (own, *own.actions.values()):
            if with_options.takes_configuration:
                _add_fields(with_options)
            with_options.add_argument("--help", action="store_true", help="what the command does")
            for argument in with_options.path_arguments():
                vars(argument)["complete"] = shtab.FILE
        made.add_action(name, summary, parents=[own])
    return made


def _add_fields(target: CommandParser) -> None:
    """Add `--config FILE` and `--section.field` for each field of the configuration."""
    target.add_argument("--config", type=Path, help="a TOML file")
    for name, field in fields().items():
        values = _values(field)
        kind = Path if field.get("format") == "path" else str
        target.add_argument(f"--{name}", choices=values, type=kind, help=field["description"])


def _values(field: Schema) -> list[str] | None:
    """Return the allowed values of a field that has a fixed choice of them, else None."""
    options = field.get("anyOf", [field])
    if any(option.get("type") == "boolean" for option in options):
        return ["true", "false"]
    named = [value for option in options for value in option.get("enum", [])]
    return [*named, *(["none"] if len(options) > 1 else [])] if named else None
