"""README and docs say what is true: their scripts run, their commands parse, their links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from plait.cli.main import main
from plait.cli.verify import parser as verify_parser
from plait.train.settings import config_from_arguments, fields, takes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "examples" / "README.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SHORTENED = doctest.ELLIPSIS


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the page and line where the text begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Script(NamedTuple):
    code: Block
    output: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])


def scripts() -> Iterator[Script]:
    """Every python block, with what the next block says it prints, if that is an output block."""
    for page in PAGES:
        for block, following in pairwise([*blocks(page), Block(page, 0, "", "")]):
            if block.language == "python":
                yield Script(block, following.text if following.language == "output" else None)


def commands() -> Iterator[tuple[str, list[str]]]:
    """`(where, arguments)` of every `plait` command in a bash block."""
    for page in PAGES:
        for block in blocks(page):
            for number, line in enumerate(block.text.splitlines()) if block.language == "bash" else ():
                words = shlex.split(line)
                for place, word in enumerate(words):
                    if Path(word).name == "plait":
                        yield f"{page.relative_to(ROOT)}:{block.line + number}", words[place + 1 :]


@pytest.mark.parametrize("script", list(scripts()), ids=lambda script: str(script.code))
def test_a_script_runs_and_prints_what_the_page_says(script: Script) -> None:
    if "import transformers" in script.code.text:
        pytest.importorskip("transformers")
    # The line numbers of the page stand in a traceback.
    code = compile("\n" * (script.code.line - 1) + script.code.text, str(script.code.page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    if script.output is not None:
        same = doctest.OutputChecker().check_output(script.output, printed.getvalue(), SHORTENED)
        assert same, f"{script.code} prints\n{printed.getvalue()}"


def test_every_output_belongs_to_a_script() -> None:
    told = sum(block.language == "output" for page in PAGES for block in blocks(page))
    assert told == sum(script.output is not None for script in scripts())


@pytest.mark.parametrize(("where", "arguments"), list(commands()), ids=lambda value: str(value)[:60])
def test_a_command_is_understood(
    where: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule is drawn; what runs ranks is only read."""
    command, *options = arguments
    if command == "verify":
        _, options = verify_parser().parse_known_args(options)
    if command in ("train", "verify"):
        monkeypatch.chdir(ROOT)
        config_from_arguments(options)
    else:
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 0, where


def test_links_lead_to_files() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link[1]}"
        for page in PAGES
        for link in LINK.finditer(page.read_text())
        if "://" not in link[1] and not (page.parent / link[1]).exists()
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []


def test_every_field_stands_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guides" / "configuration.md").read_text().splitlines()
    rows = []
    for name, field in fields().items():
        default = json.dumps(field["default"]).replace("null", "none")
        rows.append(f"| `{name}` | {field['description']} | {takes(field)} | `{default}` |")
    missing = [row for row in rows if row not in guide]
    assert not missing, "docs/guides/configuration.md lacks\n" + "\n".join(missing)
    told = [line for line in guide if line.startswith("| `")]
    assert len(told) == len(rows), f"no fields any more: {sorted(set(told) - set(rows))}"


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    files = [
        file for file in (ROOT / "examples").rglob("*.*") if file.suffix in (".py", ".toml", ".sh", ".sbatch")
    ]
    assert [file.name for file in files if f"({file.relative_to(ROOT / 'examples')})" not in listed] == []
