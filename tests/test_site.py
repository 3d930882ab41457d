"""The site of the docs: the reference has every public name, and no page needs anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from test_docs import PAGES, ROOT, scripts

REFERENCE = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
PUBLIC = (
    "plait",
    "plait.tensor.autograd",
    "plait.checkpoint.dtensor",
    "plait.ranks",
    "plait.tensor.attention",
    "plait.engine",
    "plait.plan.layout",
    "plait.loop",
    "plait.models",
    "plait.models.huggingface",
    "plait.tensor",
)
"""Modules whose `__all__` is public; so is every name that a page or an example imports."""
IMPORTED = re.compile(r"^from (plait[\w.]*) import (.+)$", re.MULTILINE)


def found(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def home(name: str) -> str:
    """The name under which an object was defined, so that two names of one object are the same."""
    value = found(name)
    origin, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{origin}.{own}" if origin and own and "plait" in origin else name


def public_names() -> set[str]:
    names = {f"{module}.{name}" for module in PUBLIC for name in import_module(module).__all__}
    texts = [script.code.text for script in scripts()]
    texts += [path.read_text() for path in (ROOT / "examples").rglob("*.py")]
    for text in texts:
        for module, imported in IMPORTED.findall(text):
            names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    modules = {"plait.models"}
    of_others = {
        name for name in names if not getattr(found(name), "__module__", "plait").startswith("plait")
    }
    return names - modules - of_others


def test_every_public_name_stands_once_in_the_reference() -> None:
    pages = defaultdict(list)
    for page in REFERENCE:
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            pages[home(name)].append(page.name)
    assert {name for name in public_names() if home(name) not in pages} == set()
    assert {name: where for name, where in pages.items() if len(where) > 1} == {}


def test_the_hook_shows_what_is_linked_outside_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    hook = import_module("repository_pages")
    assert hook.target_of("docs/guides/gpus.md", "../../benchmarks/gpu") == "benchmarks/gpu/README.md"
    assert hook.target_of("docs/guides/gpus.md", "../../nowhere.md") is None
    assert hook.page_of("docs/guides/gpus.md") == "guides/gpus.md"
    assert hook.page_of("examples/own_model.py") == "repository/examples/own_model.py.md"


class Links(HTMLParser):
    """The addresses on a page, its anchors, and those from which a browser loads something by itself."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors.add(given.get("id", given.get("name", "")))
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        elif tag in ("link", "script", "img", "iframe"):
            self.loads += [given[name] for name in ("href", "src") if name in given]


@pytest.mark.full
def test_the_site_has_no_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page: Links(page) for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > len(PAGES)
    broken = []
    for page, links in pages.items():
        assert [address for address in links.loads if "://" in address] == [], page
        for address in links.leads + links.loads:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            known = target not in pages or not anchor or anchor in pages[target].anchors
            if not target.is_file() or not known:
                broken.append(f"{page.relative_to(tmp_path)}: {address}")
    assert not broken, "\n".join(broken)
