"""`plait doctor`: check this host, then two ranks on it, and say what to change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from plait.app.cli.arguments import CommandParser
from plait.app.cli.ranks_and_signals import importing
from plait.errors import PlaitError

if TYPE_CHECKING:
    from plait.ranks.host_diagnostics import HostFinding

_ABOUT = """\
Checks versions, backends, devices, limits, network and clock of this host, then
starts two ranks here that communicate. Exit code 1 if something has to change."""
_EXAMPLES = (("plait doctor", "this host"), ("srun --ntasks-per-node 1 plait doctor", "each host of a job"))
_CALLS = 100


def parser() -> CommandParser:
    """Return the parser of the options of `plait doctor`."""
    made = CommandParser("plait doctor", description=_ABOUT, examples=_EXAMPLES)
    made.add_argument("--no-ranks", action="store_true", help="start no ranks")
    return made


def run(argv: Sequence[str]) -> int:
    """Check this host and two ranks on it, print the findings, and return 1 if one needs a change, else 0."""
    options = parser().parse_args(argv)
    with importing():
        from plait.ranks.host_diagnostics import check_host

    console = Console(markup=False, highlight=False)
    findings = [*check_host(), *(() if options.no_ranks else _two_ranks())]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.about, finding.found)
    console.print(table)
    remedies = [finding for finding in findings if finding.remedy]
    for finding in remedies:
        print(f"change {finding.about}: {finding.remedy}")
    if not remedies:
        print("Nothing has to be changed.")
    return 1 if remedies else 0


def _two_ranks() -> Iterator[HostFinding]:
    from plait.ranks.host_diagnostics import HostFinding
    from plait.ranks.launch.launch import launch

    start = time.perf_counter()
    try:
        seconds = max(launch(_all_reduces, ranks=2, threads=1, timeout=30.0, device="cpu"))
    except PlaitError as error:
        yield HostFinding("two ranks", "they failed", str(error).splitlines()[0])
        return
    took = time.perf_counter() - start
    yield HostFinding(
        "two ranks", f"started in {took - seconds:.1f} s; an all-reduce takes {seconds / _CALLS * 1e6:.0f} µs"
    )


def _all_reduces() -> float:
    """Return the seconds that some all-reduces of 4 bytes take."""
    import torch

    from plait.ranks.collectives import all_reduce
    from plait.ranks.mesh import Mesh

    mesh = Mesh(dp=2, device="cpu")
    group, tensor = mesh.group("dp"), torch.ones(1)
    all_reduce(tensor, group).wait()
    start = time.perf_counter()
    for _ in range(_CALLS):
        all_reduce(tensor, group).wait()
    return time.perf_counter() - start
