"""The notebooks in examples/notebooks run, and show what is saved in them."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

import notebooks
from parity.pairs import in_quick

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
AGAIN = "run .venv/bin/python tests/notebooks.py, and look at what has changed"


def outputs_to_compare(notebook: dict[str, Any]) -> dict[str, Any]:
    """The outputs of each cell by its id; of measured ones only their kinds."""
    return {
        cell["id"]: [kinds(one) for one in cell["outputs"]] if cell["metadata"] else cell["outputs"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    }


def kinds(output: dict[str, Any]) -> tuple[str, ...]:
    return (output["output_type"], *sorted(output.get("data", ())))


@pytest.mark.full
@pytest.mark.parametrize("name", in_quick((path.stem for path in PATHS), "first_steps"))
def test_notebook_cells_print_their_saved_outputs(name: str) -> None:
    path = notebooks.FOLDER / f"{name}.ipynb"
    saved = notebooks.read(path)
    found = notebooks.run(saved)
    assert outputs_to_compare(found) == outputs_to_compare(saved), AGAIN
    for cell, old in zip(found["cells"], saved["cells"], strict=True):
        cell.update({"outputs": old["outputs"]} if "outputs" in old else {})
    assert path.read_text(encoding="utf-8") == notebooks.as_text(found), f"not as it is saved: {AGAIN}"


def test_svg_pictures_saved_in_notebooks_are_well_formed() -> None:
    pictures = [
        "".join(output["data"]["image/svg+xml"])
        for path in PATHS
        for cell in notebooks.read(path)["cells"]
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", ())
    ]
    assert pictures
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag.endswith("svg")
