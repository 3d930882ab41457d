"""Starts rank processes from a fork server, which has imported the packages that every rank needs."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from plait.errors import MeshError
from plait.ranks.launcher_processes import environment_of, is_stopped, process_identity

_PERIOD = 0.2
"""Seconds between two looks at a fork server that is to start a process, and until the next try."""
_MOST_SECONDS = 600.0
"""Seconds for a fork server to start a process; the first one imports torch before."""
_MOST_SERVERS = 5
"""Tries to start a process after each of which the fork server was lost."""
_STARTED: ContextVar[tuple[str, ...]] = ContextVar("plait_started_processes", default=())
"""The identities (`process_identity`) of the processes that were started."""


def start_process(
    target: Callable[[Connection], object],
    name: str,
    module: str,
    library: str | None,
    preloaded: Sequence[str] = (),
) -> tuple[ForkServerProcess, Connection]:
    """Start a process that calls `target` with its end of a pipe; return it, and the other end.

    A fork server starts it, not this process, which may have threads. It imports what every rank needs,
    `module` if that is plait's, and the modules `preloaded`, before it forks, and lasts as long as this
    process. `library`: a shared library that it loads in place of another of that name. Raises MeshError
    where the folder of temporary files cannot have its socket, and where servers are lost again and again.
    """
    context = multiprocessing.get_context("forkserver")
    ours = [module] if module.startswith("plait.") else []
    context.set_forkserver_preload(["plait.ranks.launch.preload", *ours, *preloaded])
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there,), name=name, daemon=True)
    with _preloaded(library), _without_main(), _blocked_signal(signal.SIGTERM), _killed_where_stopped():
        try:
            _start(process)
        except OSError as error:
            if "AF_UNIX path too long" not in str(error):
                raise
            raise MeshError(
                f"the folder of temporary files, {tempfile.gettempdir()}, has too long a path for a socket: "
                "set TMPDIR to a shorter one."
            ) from None
    there.close()
    assert process.pid is not None, "it has started"
    identity = process_identity(process.pid)
    if "-" in identity:  # else it has ended already
        _STARTED.set((*_living(), identity))
    return process, here


def started_processes() -> list[int]:
    """Return the ids of the processes that `start_process` has started in this thread, and that live.

    Also where their fork server was killed: multiprocessing takes all of them for ended then.
    """
    return [int(one.partition("-")[0]) for one in _living()]


def _living() -> list[str]:
    """Return the identities of the processes that were started in this thread, and that live."""
    return [one for one in _STARTED.get() if process_identity(int(one.partition("-")[0])) == one]


def _start(process: ForkServerProcess) -> None:
    """Start a process from the fork server; if that is lost meanwhile, from a new one."""
    for is_last in (*[False] * _MOST_SERVERS, True):
        try:
            process.start()
            return
        except (EOFError, ConnectionError) as error:
            if is_last:
                raise MeshError(
                    "the process that ranks are forked from, which imports torch, was killed whenever it was "
                    f"started, or started none within {_MOST_SECONDS:g} s: see whether memory suffices, and "
                    "the system's log."
                ) from error
            time.sleep(_PERIOD)  # the killed one may still be there


@contextlib.contextmanager
def _killed_where_stopped() -> Iterator[None]:
    """Context in which the fork server is killed if it hangs, or was stopped by a signal such as SIGSTOP.

    It would answer no more, and multiprocessing waits for it without a limit. Another one takes its place.
    """
    has_ended = threading.Event()

    def watch() -> None:
        deadline, was_stopped = time.monotonic() + _MOST_SECONDS, None
        while not has_ended.wait(_PERIOD):
            server = _server_process()
            stopped = server if server is not None and is_stopped(server) else None
            if server is not None and (stopped == was_stopped is not None or time.monotonic() > deadline):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
                deadline = time.monotonic() + _MOST_SECONDS
            was_stopped = stopped  # twice: Ctrl-Z stops and goes on with all processes, one after another

    watch_thread = threading.Thread(target=watch, name="plait-fork-server", daemon=True)
    watch_thread.start()
    try:
        yield
    finally:
        has_ended.set()
        watch_thread.join()


@contextlib.contextmanager
def _preloaded(library: str | None) -> Iterator[None]:
    """Within the context, a fork server starts with `library` loaded before another of that name.

    One that runs without it is ended, unless the program has processes of its own, which it watches.
    """
    if library is None:
        yield
        return
    before = os.environ.get("LD_PRELOAD")
    wanted = " ".join(filter(None, (library, before)))
    server = _server_process()
    if server is not None and f"LD_PRELOAD={wanted}" not in environment_of(server):
        if multiprocessing.active_children():
            raise MeshError(
                f"ranks that share a GPU need {library}, and processes without it run already: start the "
                f"program with LD_PRELOAD={library}."
            )
        stop_fork_server()
    os.environ["LD_PRELOAD"] = wanted
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD")
        os.environ |= {} if before is None else {"LD_PRELOAD": before}


def _server_process() -> int | None:
    """Return the process id of this process's fork server, if there is one."""
    server: Any = multiprocessing.forkserver._forkserver
    return None if server._forkserver_pid is None else int(server._forkserver_pid)


@atexit.register  # before any pool is closed at exit, so called after
def stop_fork_server() -> None:
    """Kill this process's fork server, if any, unless processes of `multiprocessing` still need it.

    It would outlive this process while it unloads torch. Left as it is where the program has processes of its
    own, which multiprocessing waits for by the server; not where it is stopped, since multiprocessing would
    wait for ever.
    """
    process = _server_process()
    if process is not None and (is_stopped(process) or not multiprocessing.active_children()):
        os.kill(process, signal.SIGKILL)
        server: Any = multiprocessing.forkserver._forkserver
        server._stop()


@contextlib.contextmanager
def _blocked_signal(number: int) -> Iterator[None]:
    """Block signal `number` within the context, so that a fork server started there inherits the mask."""
    multiprocessing.resource_tracker.ensure_running()  # starting it later would unblock SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module while a process starts, so that multiprocessing does not run it again.

    No rank needs it, since functions of the main module are pickled by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
