"""What the fork server of ranks starts with, and what is put back in the process that starts it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from contextvars import copy_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from plait.errors import MeshError
from plait.ranks.launch import fork_server

ENDED = 1 << 22
"""No process of Linux has this number, or a larger one."""


def preload() -> str | None:
    return os.environ.get("LD_PRELOAD")


@pytest.mark.parametrize("before", [None, "old.so"])
def test_a_fork_server_without_a_preloaded_library_is_replaced(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Unless there are processes of the program, which it watches."""
    monkeypatch.setenv("LD_PRELOAD", before or "")
    if before is None:
        monkeypatch.delenv("LD_PRELOAD")
    wanted = "new.so" if before is None else "new.so old.so"
    environment, stopped, children = [f"LD_PRELOAD={wanted} more.so"], list[int](), list[int]()
    monkeypatch.setattr(fork_server, "_server_process", lambda: 7)
    monkeypatch.setattr(fork_server, "environment_of", lambda process: environment)
    monkeypatch.setattr(fork_server, "stop_fork_server", lambda: stopped.append(1))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    with fork_server._preloaded(None):
        assert preload() == before
    assert stopped == []
    with suppress(ZeroDivisionError), fork_server._preloaded("new.so"):
        assert (preload(), stopped) == (wanted, [1])
        raise ZeroDivisionError
    assert preload() == before
    children.append(5)
    with pytest.raises(MeshError, match=r"ranks that share a GPU need new\.so, and processes without it run"):
        fork_server._preloaded("new.so").__enter__()
    environment.append(f"LD_PRELOAD={wanted}")
    with fork_server._preloaded("new.so"):
        assert (preload(), stopped) == (wanted, [1])
    monkeypatch.setattr(fork_server, "_server_process", lambda: None)
    with fork_server._preloaded("new.so"):
        assert (preload(), stopped) == (wanted, [1])
    assert preload() == before


def test_the_main_module_and_the_signals_are_put_back() -> None:
    main, before = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with suppress(ZeroDivisionError), fork_server._without_main(), fork_server._blocked_signal(10):
        assert not hasattr(sys.modules["__main__"], "__file__")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {10}
        raise ZeroDivisionError
    assert sys.modules["__main__"] is main
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_folder_of_temporary_files_with_too_long_a_path_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(process: ForkServerProcess) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(ForkServerProcess, "start", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MeshError, match=f"the folder of temporary files, {tmp_path}, has too long a path"):
        fork_server.start_process(print, "one", "plait.ranks", None)


def test_a_process_is_started_again_where_the_fork_server_was_killed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def start(process: ForkServerProcess) -> None:
        started.append(process.name)
        if len(started) == 1:
            raise EOFError("unexpected EOF")

    monkeypatch.setattr(ForkServerProcess, "start", start)
    monkeypatch.setattr(ForkServerProcess, "pid", ENDED)
    fork_server.start_process(print, "one", "plait.ranks", None)[1].close()
    assert started == ["one", "one"]
    assert ENDED not in fork_server.started_processes()


@pytest.mark.parametrize("state", ["stopped", "hangs"])
def test_a_fork_server_that_starts_no_process_is_killed_and_another_tried(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    killed, signals = threading.Semaphore(0), list[tuple[int, int]]()

    def start(process: ForkServerProcess) -> None:
        if state == "hangs" or not signals:
            assert killed.acquire(timeout=60)
            raise EOFError("unexpected EOF")

    def kill(process: int, number: int) -> None:
        signals.append((process, number))
        killed.release()

    monkeypatch.setattr(ForkServerProcess, "start", start)
    monkeypatch.setattr(ForkServerProcess, "pid", ENDED)
    monkeypatch.setattr(fork_server, "_server_process", lambda: 7)
    monkeypatch.setattr(fork_server, "is_stopped", lambda _: state == "stopped" and not signals)
    monkeypatch.setattr(fork_server, "_PERIOD", 0.01)
    monkeypatch.setattr(os, "kill", kill)
    if state == "stopped":
        fork_server.start_process(print, "one", "plait.ranks", None)[1].close()
        assert signals == [(7, signal.SIGKILL)]
        return
    monkeypatch.setattr(fork_server, "_MOST_SECONDS", 0.02)
    with pytest.raises(MeshError, match=r"that ranks are forked from, .* or started none within 0.02 s"):
        fork_server.start_process(print, "one", "plait.ranks", None)


def test_processes_that_were_started_are_known_although_their_fork_server_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ForkServerProcess, "start", lambda process: None)
    monkeypatch.setattr(multiprocessing, "active_children", list)

    def started() -> tuple[bool, bool]:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            monkeypatch.setattr(ForkServerProcess, "pid", child.pid)
            fork_server.start_process(print, "one", "plait.ranks", None)[1].close()
            lives = child.pid in fork_server.started_processes()
        return lives, child.pid in fork_server.started_processes()

    assert copy_context().run(started) == (True, False)
