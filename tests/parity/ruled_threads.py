"""Ranks as threads that communicate under NCCL's rules, and wait for each of their operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from parity.stream_rules import StreamRules
from parity.stream_transport import StreamTransport
from plait.ranks.launch.rank_threads import run_threads
from plait.ranks.transport.threads.transport import current_thread_rank


def run_ruled_threads(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int,
    threads: int,
    rules: StreamRules,
    shared_results: dict[Hashable, Any] | None = None,
) -> list[Any]:
    """Return what `run_threads` does, under `rules`; an operation that is never awaited is an error."""

    def awaiting(*arguments: Any) -> Any:
        result = function(*arguments)
        local = current_thread_rank()
        assert local is not None
        rules.require_awaited(local.rank)
        return result

    make_transport = partial(StreamTransport, rules=rules)
    return run_threads(awaiting, arguments, ranks, threads, shared_results, make_transport)
