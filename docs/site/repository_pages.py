"""Hook of mkdocs: what a page links to outside of docs/ becomes a page of the site.

A README, the changelog, an example or a script of a benchmark is shown under `repository/`, by its path in
the repository; source files as a block of code. So links between files work in a clone and in the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDER = "repository/"
LINK = re.compile(r"\]\((?![a-z]+:|[#/])([^)#\s]+)")
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".toml": "toml"}
SOURCE = """---
search:
  exclude: true
---

# {path}

````{language}
{text}
````
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links to, directly or through such pages."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(_generated(path, config))
        text = (ROOT / path).read_text() if path.endswith(".md") else ""
        targets = {target for link in LINK.findall(text) if (target := target_of(path, link))}
        waiting += (one for one in targets - seen if not one.startswith("docs/"))
        seen |= targets
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page, in which links to files of the repository lead to their pages."""
    if page.parent is None:  # no other page is beside it in the navigation
        page.meta.setdefault("hide", ["navigation"])
    path = page.file.src_uri
    if path.startswith((FOLDER, "reference/api/")):
        page.meta.setdefault("search", {"boost": 0.5})  # guides and concepts are found first
    path = path.removeprefix(FOLDER) if path.startswith(FOLDER) else f"docs/{path}"

    def replaced(link: re.Match[str]) -> str:
        target = target_of(path, link[1])
        if target is None:
            return link[0]
        return f"]({posixpath.relpath(page_of(target), posixpath.dirname(page.file.src_uri) or '.')}"

    return LINK.sub(replaced, markdown)


def target_of(path: str, link: str) -> str | None:
    """Return the file that `link` names on the page of `path`, from the root; of a folder its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    return target if (ROOT / target).is_file() else None


def page_of(path: str) -> str:
    """Return the place in the site of a file of the repository, as mkdocs names its sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return FOLDER + (path if path.endswith(".md") else f"{path}.md")


def _generated(path: str, config: MkDocsConfig) -> File:
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        text = notebook_text(json.loads(text))
    elif not path.endswith(".md"):
        language = LANGUAGES.get(Path(path).suffix, "text")
        text = SOURCE.format(path=path, language=language, text=text.rstrip())
    return File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its text, its code, and what its cells show as text or as a picture."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", ())))
            picture = "".join(data.get("image/svg+xml", ())).replace("\n", "")
            parts.append(picture or f"````text\n{text}\n````")
    return "\n\n".join(parts)
