"""Notebooks without Jupyter: cells are run in order, and saved with their outputs and nothing else.

.venv/bin/python tests/notebooks.py      runs the notebooks in examples/notebooks, and saves their outputs

Plain `exec` needs no kernel and no dependency, and ranks are threads of the process that tests. Outputs are
what Jupyter shows: the text that a cell prints, and its last expression, as a picture where it has one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
MEASURED = "measured"
"""Tag of cells whose output depends on the machine: times, and the last digits of numbers."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs that its cells have now, without whatever an editor has added."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        tags = [tag for tag in cell["metadata"].get("tags", ()) if tag == MEASURED]
        clean = {
            "cell_type": cell["cell_type"],
            "id": cell["id"],
            "metadata": {"tags": tags} if tags else {},
            "source": _lines(source),
        }
        if cell["cell_type"] == "code":
            clean |= {"execution_count": None, "outputs": _run_cell(source, cell["id"], names)}
        cells.append(clean)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _run_cell(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_svg_"):
            data = {"image/svg+xml": _lines(value._repr_svg_()), **data}
        shown = {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        outputs.append(shown)
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def as_text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(as_text(run(read(path))), encoding="utf-8")
        print(path.name)
