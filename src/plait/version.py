"""The version of plait, and of the packages that it uses."""

from __future__ import annotations

VERSION = "0.1.0"


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
