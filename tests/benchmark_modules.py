"""`find_modules_of`: lets a test import a benchmark's modules, whose names those of others have, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def find_modules_of(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `import_module` find the modules of a benchmark's folder until `patch` is undone.

    One of the same name that another test has imported from elsewhere is put back then.
    """
    for file in folder.glob("*.py"):
        known = sys.modules.get(file.stem)
        if known is not None and known.__file__ != str(file):
            patch.delitem(sys.modules, file.stem)
    patch.syspath_prepend(str(folder))
