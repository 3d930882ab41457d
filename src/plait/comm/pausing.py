"""Waits for what is no communication: where ranks are threads that take turns, the others run meanwhile."""

from __future__ import annotations

import threading
import time

from plait.comm.transport.local import current_local_rank

_LOOK = 0.002
"""Seconds between two looks at what is waited for."""


def pause(seconds: float) -> None:
    """Sleep for `seconds`."""
    rank = current_local_rank()
    if rank is None:
        time.sleep(seconds)
    else:
        rank.pause(seconds)


def join(thread: threading.Thread) -> None:
    """Block until a thread that this rank has started ends."""
    if current_local_rank() is not None:
        while thread.is_alive():
            pause(_LOOK)
    thread.join()
