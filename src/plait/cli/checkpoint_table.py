"""What `plait checkpoint inspect` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from plait.plan import Plan

if TYPE_CHECKING:
    from plait.checkpoint.inspecting import Summary

_MOST_TOLD = 60
"""Characters of a value of the state."""


def show(found: Summary) -> None:
    """Print a summary: a line for each thing, a table of tensors, and what is damaged."""
    console = Console(markup=False, highlight=False)
    facts = {
        "checkpoint": found.path,
        "is": _verdict(found),
        "state": _values(found.state),
        "run": _values(found.run),
        "plan": _plan(found.plan),
        "optimizer": found.optimizer or "none",
        "model": f"{found.elements:,} elements",
        "files": f"{len(found.files)}, {found.bytes:,} bytes",
        "written by": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for name, told in facts.items():
        lines.add_row(name, told or "nothing")
    console.print(lines)
    console.print()
    console.print(_tensors(found))
    for flaw in found.flaws:
        print(f"damaged: {flaw}")  # in one line


def _verdict(found: Summary) -> str:
    if found.flaws:
        return "damaged, see below"
    return "complete" if found.checked else "complete by the sizes of its files; --check reads them"


def _tensors(found: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("boxes", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for one in found.tensors:
        shape = " × ".join(map(str, one.shape)) or "()"
        table.add_row(one.name, shape, one.dtype, str(one.boxes), f"{one.bytes:,}")
    return table


def _plan(plan: Mapping[str, Any]) -> str:
    """What of a plan is not the usual."""
    if not plan:
        return "none"
    usual = json.loads(json.dumps(asdict(Plan())))
    unusual = {name: value for name, value in plan.items() if name not in usual or value != usual[name]}
    return _values(unusual) or "the usual, of one rank"


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _MOST_TOLD:
        return text
    return f"{{{', '.join(value)}}}" if isinstance(value, Mapping) else f"{text[: _MOST_TOLD - 1]}…"
