"""The package itself: its version, and its modules and public names, imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VERSION = "0.1.0"


def public_name(package: str, name: str, homes: Mapping[str, Sequence[str]]) -> Any:
    """Import and return `name`: from the module of `homes` that lists it, else a submodule of `package`."""
    for module, names in homes.items():
        if name in names:
            return getattr(import_module(module), name)
    return submodule(package, name)


def submodule(package: str, name: str) -> ModuleType:
    """Import and return the submodule `name` of a package. Raises AttributeError if there is none.

    So `plait.checkpoint.dcp` is there after `import plait`, which imports neither.
    """
    if name.startswith("_") or "." in name or find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")


def version_of(package: str) -> str:
    """Return the version of a package, "" if not installed; for plait that of the running code.

    So plait also runs where it is not installed, from a folder in `PYTHONPATH`.
    """
    if package == "plait":
        return VERSION
    from importlib import metadata  # late: it would double the time of `import plait`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
