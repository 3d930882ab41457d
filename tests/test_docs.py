"""README and docs say what is true: their scripts run, their commands parse, their links lead somewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import plait
from plait.app.cli.arguments import split_options
from plait.app.cli.checkpoint import read_options as checkpoint_options
from plait.app.cli.data import parser as data_parser
from plait.app.cli.evaluate import parser as evaluate_parser
from plait.app.cli.main import main
from plait.app.cli.report import parser as report_parser
from plait.app.cli.verify import parser as verify_parser
from plait.app.config.config_parser import allowed_values_text, config_from_arguments, fields
from plait.engine import Engine
from plait.models.huggingface import FAMILIES
from plait.plan.plan import Plan
from plait.ranks import Mesh

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "examples").rglob("README.md")), ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
WRITTEN = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
TUTORIALS = ROOT / "docs" / "tutorials"
PROMISE = re.compile(
    r"\bto come(?= ?[.,;|()]|$)|\bnot yet\b|\bplanned\b|\bcoming soon\b|\bin a later (version|part)\b"
    r"|\bwill (be (added|supported)|come)\b"
)
SHORTENED = doctest.ELLIPSIS
SLOW = {
    "checkpoints": ("load_checkpoint", "transformers.Auto"),
    "context-parallelism": ("for layout in (", "context=32768"),
    "compiled-layers": ("def gradients",),
    "dtensor": ("named_dtensors",),
    "experts": ("balance_experts", 'linears="float8'),
    "fine-tuning": ("plait.lora(",),
    "float8": ("gathered_bytes",),
    "guards": ("guarded=True",),
    "huggingface": ("LlamaForCausalLM", "import transformers"),
    "muon": ("plait.Owned(",),
    "sharding": ("layers=12",),
    "traces": ("torch.profiler",),
    "which-plan": ("layers=32", "ranks_as="),
    "your-own-loop": ("warmup_cosine", "tempfile"),
}
"""By page, what stands in scripts that are slow, or show what other quick tests do: the full run has them."""
SLOW_COMMANDS = ("--calibrate", "--html", "--model.layers 24", "schedule auto", "plan --ranks 4", "zb-v,auto")
"""What stands in commands that take many seconds, or search for what the command of another page does."""
ON_PROCESSES = {"dtensor": "", "failures": "elastic=True", "launching": "", "traces": ""}
"""By page, what stands in scripts whose ranks are processes in the quick run, too; others' are threads."""


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


def commands() -> Iterator[tuple[Block, list[str]]]:
    """`(line, arguments)` of every `plait` command in a bash block."""
    for page in PAGES:
        for block in blocks(page):
            for number, line in enumerate(block.text.splitlines()) if block.language == "bash" else ():
                words = shlex.split(line) if "plait" in line else []
                for place, word in enumerate(words):
                    if Path(word).name == "plait":
                        yield Block(page, block.line + number, "bash", line), words[place + 1 :]


def marks_of(script: Script) -> list[pytest.MarkDecorator]:
    """Concepts, and what other libraries call things, change less than guides: theirs are in the full run.

    So are scripts of tutorials, as their commands are, and those that are slow.
    """
    page = script.code.page
    slow = any(words in script.code.text for words in SLOW.get(page.stem, ()))
    return [pytest.mark.full] if slow or page.parent.name in ("concepts", "coming-from", "tutorials") else []


@pytest.mark.parametrize(
    "script", [pytest.param(script, id=str(script.code), marks=marks_of(script)) for script in scripts()]
)
def test_a_script_runs_and_prints_what_the_page_says(
    script: Script, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_processes = ON_PROCESSES.get(script.code.page.stem)
    on_threads = on_processes is None or on_processes not in script.code.text
    if on_threads and "not full" in pytestconfig.option.markexpr:
        for name in ("launch", "verify"):
            monkeypatch.setattr(plait, name, partial(getattr(plait, name), ranks_as="threads"))
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
    """Or, in a tutorial, to commands, which `test_tutorials.py` runs."""
    for page in PAGES:
        shown = {"python", "bash"} if page.parent == TUTORIALS else {"python"}
        for block, following in pairwise([Block(page, 0, "", ""), *blocks(page)]):
            assert following.language != "output" or block.language in shown, following


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        pytest.param(
            *one, marks=[pytest.mark.full] if any(words in one[0].text for words in SLOW_COMMANDS) else []
        )
        for one in commands()
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_plait_command_on_a_page_is_accepted_by_the_command_line(
    line: Block, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule is drawn; what runs ranks, needs a run, or is a step of a tutorial is only read."""
    command, *options = arguments
    for name, text in WRITTEN.findall(line.page.read_text()):
        (tmp_path / name).write_text(text)
    in_tutorial = line.page.parent == TUTORIALS
    monkeypatch.chdir(tmp_path if in_tutorial or command not in ("train", "verify") else ROOT)
    if command == "verify":
        _, options = verify_parser().parse_known_args(options)
    if command in ("train", "verify"):
        made_before = {"model": "llama", "tuned": "llama"} if in_tutorial else {}
        config_from_arguments([made_before.get(word, word) for word in options])
    elif command == "evaluate":
        own, of_run = split_options(options)
        assert evaluate_parser().parse_args(own).run
        config_from_arguments(of_run)
    elif command == "report":
        assert report_parser().parse_args(options).runs
    elif in_tutorial and command == "data":
        assert data_parser().parse_args(options).folder
    elif in_tutorial and command == "checkpoint":
        assert checkpoint_options(options).path
    else:
        assert main(arguments) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_announces_as_future_what_already_exists(page: Path) -> None:
    wrong = {sentence: names for sentence in sentences(page.read_text()) if (names := promised(sentence))}
    assert not wrong, "\n".join(f"{sentence!r} names {sorted(names)}" for sentence, names in wrong.items())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("| `--num-layers-per-virtual-pipeline-stage` | to come (`parallel.chunks`) |", {"chunks"}),
        ("| `--save`, `--load` | to come |", {"save", "load"}),
        ("| `SequenceParallel()` | to come |", {"sequence_parallel"}),
        ("plait's engine leaves optimizer and loop to you; sharding\n  is to come.", {"sharding"}),
        ("Training runs `gpipe`; `zb-v` is not yet supported.", {"zb_v"}),
        ("- `fp8` is to come.\n- `save` is there.", set()),
        ("It waits for gradients to come back.", set()),
    ],
)
def test_an_announcement_of_an_existing_feature_is_found(text: str, names: set[str]) -> None:
    assert set().union(*map(promised, sentences(text))) == names


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, its list items and rows of tables, without blocks of code."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\||- |#)", re.sub(BLOCK, "", text))
    for paragraph in paragraphs:
        yield from re.split(r"(?<=[.;:])\s+", " ".join(paragraph.split()))


def promised(sentence: str) -> set[str]:
    """What exists and is named in `sentence`, if that says of something that it will come."""
    if not PROMISE.search(sentence):
        return set()
    words = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower() for word in re.findall(r"[\w-]+", sentence))
    return {word.strip("-").replace("-", "_") for word in words} & existing()


@cache
def existing() -> frozenset[str]:
    """Fields of the configuration and of plans, values that they take, public names, and packages."""
    configured = {name.rpartition(".")[2] for name in fields()} - {"name", "dir", "source", "steps"}
    values = {str(value) for field in fields().values() for value in field.get("enum", ())} - {"none", "full"}
    public = set().union(*(import_module(name).__all__ for name in ("plait", "plait.ranks", "plait.tensor")))
    packages = {path.parent.name for path in (ROOT / "src" / "plait").rglob("__init__.py")}
    packages -= {"parallel", "time", "train"}
    names = configured | values | public | packages | set(Plan.__dataclass_fields__)
    return frozenset(
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_") for name in names
    ) - {"model", "data", "plan", "run"}


def test_every_name_of_plait_on_a_page_exists() -> None:
    wrong = []
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", re.sub(BLOCK, "", page.read_text())):
            names = [match[0] for match in re.finditer(r"\bplait(\.[A-Za-z_]\w*)+", code)]
            wrong += [f"{page.name}: {name}" for name in names if not is_there(name)]
            for call in re.finditer(r"\bPlan\(([^)]*)\)", code):
                given = set(re.findall(r"(\w+)=", call[1]))
                wrong += [f"{page.name}: Plan({name})" for name in given - set(Plan.__dataclass_fields__)]
    assert not wrong


def is_there(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    module, _, last = name.rpartition(".")
    with contextlib.suppress(ImportError):
        return import_module(name) is not None
    return is_there(module) and hasattr(_found(module), last) if module else False


def _found(name: str) -> object:
    with contextlib.suppress(ImportError):
        return import_module(name)
    module, _, last = name.rpartition(".")
    return getattr(_found(module), last)


def test_every_field_of_a_plan_stands_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "plan.md").read_text()
    for field in dataclasses.fields(Plan):
        default = str(field.default) if field.default in (None, False) else json.dumps(field.default)
        row = rf"^\| `{field.name}` \| `?{re.escape(default)}`? \|"
        assert re.search(row, page, re.MULTILINE), (
            f"docs/reference/plan.md has no row for {field.name} = {default}"
        )


@pytest.mark.parametrize(("kind", "page"), [(Engine, "engine"), (Mesh, "plan")])
def test_every_public_member_stands_in_the_reference(kind: type, page: str) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"`{name}\b", text)} == set()


def test_every_relative_link_on_a_page_leads_to_a_file() -> None:
    """Or to a folder with a README, which the site shows for it."""
    broken = [
        f"{page.relative_to(ROOT)}: {link[1]}"
        for page in PAGES
        for link in LINK.finditer(page.read_text())
        if "://" not in link[1] and not is_file_or_readme(page.parent / link[1])
    ]
    assert not broken, "\n" + "\n".join(broken)


def is_file_or_readme(path: Path) -> bool:
    return path.is_file() or (path / "README.md").is_file()


def test_every_page_is_in_the_index_and_the_navigation() -> None:
    index, site = (ROOT / "docs" / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []
    assert [page for page in pages if f": {page}\n" not in site] == []


def test_every_field_of_the_configuration_is_in_the_guide_with_its_default() -> None:
    guide = (ROOT / "docs" / "guides" / "configuration.md").read_text().splitlines()
    rows = []
    for name, field in fields().items():
        default = json.dumps(field["default"]).replace("null", "none")
        rows.append(f"| `{name}` | {field['description']} | {allowed_values_text(field)} | `{default}` |")
    missing = [row for row in rows if row not in guide]
    assert not missing, "docs/guides/configuration.md lacks\n" + "\n".join(missing)
    told = [line for line in guide if line.startswith("| `")]
    assert len(told) == len(rows), f"no fields any more: {sorted(set(told) - set(rows))}"


def test_every_example_is_listed_in_its_readme() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    files = [
        file
        for file in (ROOT / "examples").rglob("*.*")
        if file.suffix in (".py", ".toml", ".sh", ".sbatch", ".ipynb")
    ]
    assert [file.name for file in files if f"({file.relative_to(ROOT / 'examples')})" not in listed] == []


def test_readme_names_the_families_of_transformers_once_and_rightly() -> None:
    readme = (ROOT / "README.md").read_text()
    row = re.search(r"sequences of layers; (.*) \[of transformers\]", readme)
    assert row is not None
    named = re.sub(r"(\w+?) ?(\d) and (\d)", r"\1\2, \1\3", row[1]).replace(" and ", ", ").split(", ")
    known = {re.sub(r"(LMHeadModel|ForCausalLM)$", "", name).lower() for name in FAMILIES}
    assert {re.sub("[ -]", "", name).lower() for name in named} == known
    assert readme.count("Qwen") == row[1].count("Qwen")


def test_make_help_describes_every_verb() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert verbs is not None
    assert re.findall(r"^([a-z-]+):.*  ## \w", makefile, re.MULTILINE) == verbs[1].split()
