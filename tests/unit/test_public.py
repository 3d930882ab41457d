from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import plait
from plait.package import VERSION, version_of


@pytest.mark.parametrize("name", plait.__all__)
def test_every_public_name_is_the_one_that_type_checkers_see(name: str) -> None:
    """The names stand twice in `plait/__init__.py`: for type checkers and for loading on first use."""
    seen = {}
    for node in ast.walk(ast.parse(Path(plait.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("plait"):
            seen |= {alias.name: node.module for alias in node.names}
    home = importlib.import_module(seen[name])
    assert getattr(plait, name) is getattr(home, name)


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in plait.__all__ if not getattr(plait, name).__doc__] == []


NAMED = re.compile(r"\bplait(?:\.[a-z]\w*)+\.\w+")
ROOT = Path(plait.__file__).parents[2]


def test_modules_that_pages_name_are_there_after_import_plait() -> None:
    """Whatever other tests have imported: the `__getattr__` of its package finds a module."""
    texts = [file.read_text() for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    missing = []
    for name in {name for text in texts for name in NAMED.findall(text)}:
        found: Any = plait
        for part in name.split(".")[1:]:
            attribute = getattr(found, part, None)
            is_module = isinstance(attribute, ModuleType) and attribute.__name__ == f"{found.__name__}.{part}"
            if is_module and part not in getattr(found, "__all__", ()) and "__getattr__" not in vars(found):
                missing.append(name)
            found = attribute
    assert sorted(missing) == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plait' has no attribute 'paralelize'"):
        _ = plait.paralelize
    assert not hasattr(plait, "parallelise")


def test_the_version_is_that_of_pyproject_toml() -> None:
    pyproject = tomllib.loads((Path(plait.__file__).parents[2] / "pyproject.toml").read_text())
    assert pyproject["project"]["dynamic"] == ["version"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "plait.package.VERSION"}
    assert plait.__version__ == VERSION == version_of("plait")
    assert version_of("a package that nobody has") == ""
