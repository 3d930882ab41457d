"""Asks the hosts of a run, one after another, at which address its supervisors met last.

A host that was started again, or cut off for a while, finds the others so: they may have gone on elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from plait.ranks.launch.elastic.host_link import Message, ask_host

_PAUSE = 0.1
"""Seconds between two questions."""
_PATIENCE = 1.0
"""Seconds for a connection, and for an answer."""


@dataclass(frozen=True)
class HubPlace:
    """Address at which the supervisors of a run meet, and the newest world that has met there."""

    number: int
    """Of the hub's host."""
    host: str
    port: int
    generation: int
    """The number of the newest world that is known to have met there; 0: none."""


def answer_where(place: HubPlace | None) -> Message:
    """Return the reply to a host that asks at which address hosts have met last, if at any."""
    return {"kind": "at"} | ({} if place is None else asdict(place))


@contextmanager
def searching(
    job: str, addresses: Callable[[], Sequence[tuple[str, int]]], found: Callable[[HubPlace], None]
) -> Iterator[None]:
    """Context in which a thread asks one host after another where it has met others, and calls `found`.

    `job`: the name of the run. `addresses`: returns the addresses and ports at which supervisors may listen.
    """
    ends = threading.Event()

    def search() -> None:
        while not ends.wait(_PAUSE):
            for host, port in addresses():
                place = _ask(job, host, port)
                if ends.wait(_PAUSE):
                    return
                if place is not None:
                    found(place)

    threading.Thread(target=search, name="plait-search", daemon=True).start()
    try:
        yield
    finally:
        ends.set()


def _ask(job: str, host: str, port: int) -> HubPlace | None:
    """Return where a host has met others; None where it does not answer, or has not met any."""
    answer = ask_host(host, port, {"kind": "where", "job": job}, "at", _PATIENCE)
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        if answer is not None:
            at, number = str(answer["host"]), int(answer["number"])
            return HubPlace(number, at, int(answer["port"]), int(answer["generation"]))
    return None
