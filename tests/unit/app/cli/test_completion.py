"""Completion in a shell: bash itself completes commands, actions, options and values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from plait.app.cli.completion import command_line
from plait.app.cli.main import main

_ROOT = Path(__file__).parents[4]
_COMPLETE = """
COMP_WORDS=({line}"{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_plait
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    return str(shtab.complete(command_line(), "bash"))


def test_bash_completes_commands_options_and_choices(script: str) -> None:
    for line, last, expected in [
        ("plait ", "tr", "train"),
        ("plait data ", "", "prepare inspect"),
        ("plait train ", "--parallel.sch", "--parallel.schedule"),
        ("plait train --parallel.schedule ", "zb", "zb-h1 zb-h2 zb-v"),
        ("plait train --parallel.overlap ", "t", "true"),
        ("plait verify ", "--is", "--isolate"),
        ("plait checkpoint export a b --format ", "p", "peft"),
        ("plait checkpoint convert a b ", "--parallel.tp", "--parallel.tp"),
        ("plait schedule ", "--cost.F", "--cost.F"),
        ("plait train --config ", "pyproject.t", "pyproject.toml"),
    ]:
        commands = script + _COMPLETE.format(line=line, last=last)
        done = subprocess.run(
            ["bash", "-c", commands], capture_output=True, text=True, timeout=60, check=True, cwd=_ROOT
        )
        assert done.stdout.split() == expected.split()


def test_completion_for_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "korn"]) == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_of_other_shells_name_the_configuration_fields(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    assert "parallel.schedule" in capsys.readouterr().out
