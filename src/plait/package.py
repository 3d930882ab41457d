"""Modules of a package, imported on first use as its attributes: the `__getattr__` of packages."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Return the module `name` of a package, imported. Raises AttributeError where there is none.

    So `plait.checkpoint.dcp` is there after `import plait`, which imports neither.
    """
    if name.startswith("_") or find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")
