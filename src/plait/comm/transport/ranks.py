"""The ranks that this one runs beside: threads of this process, else an initialised world of processes."""

from __future__ import annotations

from plait.comm.transport.interface import Ranks
from plait.comm.transport.local import current_local_rank
from plait.comm.transport.processes import joined_processes


def current_ranks() -> Ranks | None:
    """The ranks seen from this one; None where there is no other and no backend."""
    return current_local_rank() or joined_processes()
