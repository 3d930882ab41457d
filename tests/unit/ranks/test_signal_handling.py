import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import BinaryIO

import pytest
from clock import Clock

from plait.ranks.failure import process_watch
from plait.ranks.failure.process_watch import SAME_SIGNAL_SECONDS, GracefulStop, Watchdog
from plait.ranks.launch.fork_server import _without_main

BLOCKED = """
import datetime, os, sys, threading, time, signal
import torch.distributed as dist
from clock import Clock
from plait.ranks.failure import process_watch
from plait.ranks.failure.process_watch import Watchdog

store = dist.HashStore()
signal.signal(signal.SIGTERM, lambda *_: None)  # SIGTERM without a handler needs no watchdog
with Watchdog("rank 1", grace=0.3):
    print("ready", flush=True)
    store.wait(["never"], datetime.timedelta(seconds=20))  # blocks in C++, as a receive does
"""


SETUP = """
import os, signal
os.dup2(output.fileno(), 1)
os.dup2(errors.fileno(), 2)
output.close()
errors.close()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the fork server of a pool blocks it
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put in the background
"""


@contextmanager
def started(program: str) -> Iterator[tuple[BaseProcess, BinaryIO, BinaryIO]]:
    """A process that runs a program, forked from one that has imported torch; its output and its errors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plait.ranks.launch.preload"])
    (output, its_output), (errors, its_errors) = context.Pipe(False), context.Pipe(False)
    names = {"output": its_output, "errors": its_errors}
    process = context.Process(target=exec, args=(SETUP + program, names), daemon=True)
    with _without_main():
        process.start()
    its_output.close()
    its_errors.close()
    try:
        with (
            open(output.fileno(), "rb", closefd=False) as told,
            open(errors.fileno(), "rb", closefd=False) as complained,
        ):
            yield process, told, complained
    finally:
        process.kill()
        process.join()
        process.close()
        output.close()
        errors.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_a_signal_ends_a_process_blocked_in_cpp(number):
    with started(BLOCKED) as (process, output, errors):
        assert output.readline() == b"ready\n"
        time.sleep(0.2)
        os.kill(process.pid, number)
        process.join(10)
        assert process.exitcode == 128 + number
        assert errors.read().decode() == f"rank 1 got {number.name} while it waited for a peer, and ends.\n"


GRACEFUL = BLOCKED.replace("import Watchdog", "import Watchdog, GracefulStop").replace(
    'with Watchdog("rank 1", grace=0.3):',
    'stop = GracefulStop([signal.SIGTERM], lambda number: print("heard", flush=True))\n'
    'with Watchdog("rank 1", grace=0.3), stop:',
)
ASKED_AGAIN = GRACEFUL.replace("    store.wait", "    time.sleep(0.3)\n    store.wait")


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(GRACEFUL, id="in C++", marks=pytest.mark.full),
        pytest.param(ASKED_AGAIN, id="in Python, then in C++"),
    ],
)
def test_a_first_signal_waits_for_a_graceful_stop_and_a_second_ends_the_process(program):
    with started(program) as (process, output, errors):
        assert output.readline() == b"ready\n"
        if program == GRACEFUL:
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGTERM)  # at once: the same signal
        if program == ASKED_AGAIN:
            assert output.readline() == b"heard\n"
        time.sleep(1.0)  # longer than the grace, and than what is sent together
        assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == 128 + signal.SIGTERM
        assert errors.read() == b"rank 1 got SIGTERM while it waited for a peer, and ends.\n"


def test_a_signal_that_python_handles_in_time_does_not_end_the_process():
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with Watchdog("rank 0", grace=1.0):  # on a busy machine Python may come late
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 1.2
            while time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [1]


def test_a_watchdog_lets_keyboard_interrupt_through():
    """Also where this process was started in the background, with SIGINT ignored."""

    def interrupted():
        with Watchdog("rank 0", grace=1.0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    threads = threading.active_count()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert threading.active_count() == threads, "the watchdog is gone"
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_second_signal_goes_to_the_previous_handler(monkeypatch):
    seen, clock = [], Clock(lambda now: None)
    monkeypatch.setattr(process_watch, "time", clock)
    previous = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with GracefulStop([signal.SIGTERM], lambda number: seen.append(-number)):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert seen == [-signal.SIGTERM]
            clock.now += 1.1 * SAME_SIGNAL_SECONDS
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert seen == [-signal.SIGTERM, signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_leaving_a_watchdog_restores_all_signal_handlers():
    before = signal.getsignal(signal.SIGURG), threading.active_count()
    with Watchdog("rank 0"):
        assert threading.active_count() == before[1] + 1
    assert (signal.getsignal(signal.SIGURG), threading.active_count()) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_watchdog_outside_the_main_thread_starts_nothing():
    def enter():
        with Watchdog("rank 0"):
            done.append(threading.active_count())

    done: list[int] = []
    before = threading.active_count()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert done == [before + 1]
