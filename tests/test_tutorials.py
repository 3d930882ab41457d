"""The tutorials of the docs, followed as a reader would: block after block, from an empty folder."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from test_docs import ROOT, SHORTENED, TUTORIALS, Block, blocks

WITH_COMMANDS = [page for page in sorted(TUTORIALS.glob("*.md")) if "```bash" in page.read_text()]


@pytest.mark.full
@pytest.mark.transformers
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reader = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PLAIT": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for block, following in pairwise([*blocks(page), Block(page, 0, "", "")]):
        if block.language != "bash":
            continue
        done = subprocess.run(
            ["bash", "-ec", block.text], cwd=tmp_path, env=os.environ | reader, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        if following.language == "output":
            same = doctest.OutputChecker().check_output(following.text, done.stdout, SHORTENED)
            assert same, f"{block} prints\n{done.stdout}"
