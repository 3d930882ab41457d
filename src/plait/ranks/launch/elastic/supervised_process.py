"""`SupervisedProcess`: a rank process, for its supervisor: starts and stops its jobs, and sees its end."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from plait.ranks.failure.rank_activity import Activity, ActivityFile
from plait.ranks.failure.rank_failure import RankFailure, from_exit
from plait.ranks.launch.rank_job import RankJob, stack_file
from plait.ranks.launch.rank_main_loop import BECOMES_SPARE, END, LEAVES_BY_ENDING, PING, READY, STOP
from plait.ranks.launch.shut_rank_connections import shared_socket
from plait.ranks.launcher_processes import is_stopped

_GRACE = 1.0
"""Seconds for the exit code of a process that has ended, and for one that is told to end."""
_MOST_TO_END = 10.0
"""Seconds for a process that is killed: until its memory is freed, it has locks that another needs."""
_MOST_STALLED = 30.0
"""Seconds without progress of a message that has begun, after which the process is killed: it is stopped."""


class SupervisedProcess:
    """Supervisor's handle of a rank process, which runs one job after another or waits as a spare."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        assert process.pid is not None, "it has started"
        self.process, self._connection = process, connection
        _limit_stalls(connection, _MOST_STALLED)
        self._pidfd = _opened_pidfd(process.pid)
        self._job: RankJob | None = None
        self.report: bytes | RankFailure | None = None
        """The pickled result of its last job, or how that failed; None while it runs."""
        self.is_busy = False
        """Whether it has a job, or has not left the world of one that failed."""
        self.has_ended = False
        self.left_by_ending = False
        """Whether it ends only because it cannot leave a failed world otherwise: another may be started."""
        self.is_ready = False
        """Whether it has been seen to be able to take a job."""
        self._activity: ActivityFile | None = None
        self._send(PING)

    @property
    def handles(self) -> tuple[Connection, int]:
        """The connection and the pidfd, which become readable when the process sends a message, or ends."""
        return self._connection, self._pidfd

    def start(self, job: RankJob) -> None:
        """Send the process a job to run."""
        self._job, self.report, self.is_busy = job, None, True
        self._activity = ActivityFile.begin(activity_path(job.folder, job.world.rank))
        self._send(job)

    def stop(self) -> None:
        """Tell the process to end its job, if any, by an error in the job's next wait for another rank."""
        if self.is_busy:
            self._send(STOP)

    def become_spare(self) -> None:
        """Tell the process, if it was a rank, to free the run that it keeps: it is not in the next world."""
        if self._job is not None:
            self._job = self._activity = self.report = None
            self._send(BECOMES_SPARE)

    def idle_for(self, seconds: float) -> Activity | None:
        """Return the rank's activity if it has not changed for so many seconds, else None.

        None also where it has no job, or has ended it.
        """
        if self._activity is None or self.report is not None:
            return None
        activity = self._activity.read()
        return None if time.monotonic() - activity.since < seconds else activity

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, as SIGSTOP does."""
        return is_stopped(self.process.pid or 0)

    def fail(self, summary: str) -> None:
        """Kill the process, as the one whose failure ends the job; `summary` completes "rank 2 ..."."""
        assert self._job is not None, "it has a job"
        rank, folder = self._job.world.rank, self._job.folder
        self.report = RankFailure(rank, summary, _stack(folder, rank), at=time.monotonic())
        self.kill()

    def send_kill(self) -> None:
        """Send SIGKILL to the process, without waiting for its end.

        By its pidfd: multiprocessing takes all processes for ended once the one that they were forked from is
        gone, and then kills none.
        """
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process, also where it is stopped; it counts as ended even if the system takes longer."""
        self._kill(_MOST_TO_END)
        self.has_ended, self.is_busy = True, False

    def update(self) -> None:
        """Read the messages that the process has sent, and whether it has ended, without waiting."""
        if self.has_ended:
            return
        has_ended = bool(wait([self._pidfd], 0))  # looked up first: all that it has sent is there then
        with suppress(EOFError, OSError):
            self._receive()
        if has_ended:
            self.process.join(_GRACE)
            self.has_ended, self.is_busy = True, False
            if self._job is not None and self.report is None:
                rank = self._job.world.rank
                self.report = from_exit(rank, self.process.exitcode, _stack(self._job.folder, rank))

    def _receive(self) -> None:
        """Take the messages that the process has sent. Raises EOFError or OSError at the end of its pipe."""
        while self._connection.poll():
            try:
                message: bytes | RankFailure | str = pickle.loads(self._connection.recv_bytes())
            except BlockingIOError:
                self._fail_stalled("stopped while it sent a message")
                return
            if message == PING:
                self.is_ready = True
            elif message == LEAVES_BY_ENDING:
                self.left_by_ending = True
            elif isinstance(message, str):
                assert message == READY, message
                self.is_busy = False
            else:
                self.report = message
                self.is_busy = isinstance(message, RankFailure)

    def _fail_stalled(self, summary: str) -> None:
        """Kill the process because it stopped within a message, and record that as its failure."""
        if self._job is not None and self.report is None:
            self.fail(summary)
        else:
            self.kill()

    def close(self) -> None:
        """Kill the process, if it has not ended, and close its connection and pidfd."""
        self._kill(_GRACE)
        if self.process.exitcode is not None:  # else the system does not end it
            self.process.close()
        self._connection.close()
        os.close(self._pidfd)

    def end(self) -> None:
        """Tell the process to end."""
        self._send(END)

    def _kill(self, seconds: float) -> None:
        """Kill the process, and wait at most so many seconds for its end."""
        self.send_kill()
        self.process.join(_GRACE if wait([self._pidfd], seconds) else 0)

    def _send(self, message: RankJob | str | None) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except BlockingIOError:
            self._fail_stalled("stopped, and takes no message")
        except OSError:  # it has ended, which its handle shows
            return


def _opened_pidfd(process: int) -> int:
    """Return a pidfd, which is readable once the process has ended; for one that has, another such handle."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return os.eventfd(1)


def _limit_stalls(connection: Connection, seconds: float) -> None:
    """Let reads and writes of a connection raise BlockingIOError after so many seconds without progress."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with shared_socket(connection.fileno()) as own:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            own.setsockopt(socket.SOL_SOCKET, option, limit)


def activity_path(folder: str, rank: int) -> Path:
    """Return the file in which a rank writes what it does, for its supervisor."""
    return Path(folder, f"activity-{rank}")


def _stack(folder: str, rank: int) -> str:
    file = stack_file(folder, rank)
    return file.read_text() if file.exists() else ""
