"""What `--help` shows: a screen for each command, with examples; fields of the configuration by section."""

from __future__ import annotations

import re

import pytest

from plait.app.cli.completion import command_line
from plait.app.cli.main import COMMANDS, main
from plait.app.config.config_parser import fields, sections

_LINES, _COLUMNS = 40, 80
_ACTIONS = [
    f"{command} {action}" for command, parser in command_line().actions.items() for action in parser.actions
]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))


def _shown(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*arguments.split(), "--help"]) == 0
    return capsys.readouterr().out


def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ["", *COMMANDS, *_ACTIONS]:
        lines = _shown(command, capsys).splitlines()
        assert len(lines) <= _LINES
        assert [line for line in lines if len(line) > _COLUMNS] == []


def test_help_has_examples_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in [*(name for name in COMMANDS if name not in ("data", "checkpoint")), *_ACTIONS]:
        _, _, examples = _shown(command, capsys).partition("examples:\n")
        assert f"plait {command} " in f"{examples} "


def test_the_help_of_train_names_every_field_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.sub(r"\s+", " ", _shown("train", capsys))
    shown = re.sub(
        r"(\w+)\.\{(.*?)\}", lambda found: f"{found[1]}." + found[2].replace(", ", f", {found[1]}."), shown
    )
    named = shown.replace(",", " ").split()
    assert [name for name in fields() if name.partition(".")[2] not in named] == []


@pytest.mark.parametrize("command", ["train", "verify", "checkpoint convert"])
def test_help_describes_the_fields_of_a_section_or_of_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _shown(f"{command} parallel", capsys)
    assert [name for name in fields() if (f"--{name} " in shown) != name.startswith("parallel.")] == []
    assert "--parallel.tp" in shown
    assert "default 1)" in shown
    shown = _shown(f"{command} all", capsys)
    assert [name for name in fields() if f"--{name} " not in shown] == []
    assert [name for name in sections() if f"[{name}] " not in shown] == []
