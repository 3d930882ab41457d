"""`Supervisor`: starts the ranks of a run on this host; when one is lost it lets the others go on.

    running    a rank fails, dies, or makes no progress
    stop       the others are told so until each has left the world; one that does not is killed
    next       spares or new processes take the place of lost ranks, or the world becomes smaller
    start      all call the function again, as the next generation

With `Elastic(replace="later")` a smaller world becomes larger again: when new processes are ready, the ranks
leave it between two steps, and all start as the next generation.

The loop is torch's, `SimpleElasticAgent`: it numbers the ranks, over several hosts too, and calls what is
here. Whatever happens in between, such as a second failure, is seen in the next round of the loop.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from signal import SIGTERM, Signals
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from plait.errors import CorruptionError, MeshError, PlaitError
from plait.plan.argument_checks import whole
from plait.ranks.exchange_with_supervisor import go_on_before, note_possible_ranks, restored_step
from plait.ranks.failure.rank_failure import RankFailure, root_cause
from plait.ranks.launch.elastic.one_host_rendezvous import OneHostRendezvous
from plait.ranks.launch.elastic.options import Elastic
from plait.ranks.launch.elastic.several_hosts_rendezvous import SeveralHostsRendezvous
from plait.ranks.launch.elastic.supervised_process import SupervisedProcess
from plait.ranks.launch.rank_job import RankJob

_PERIOD = 0.2
"""Seconds of a look at the ranks, unless one sends something or ends."""
_GRACE = 1.0
"""Seconds for the failure that caused others to be reported, and for processes to end."""
_SAME_FAILURES = 3
"""Times that one failure happens without new snapshots, after the last of which the run ends."""
_LEAST_PATIENCE, _MOST_PATIENCE, _SHARE_OF_LIMIT = 1.0, 600.0, 0.05
"""Seconds that a rank is given to leave a failed world, at least, and as a share of the limit.

Where nothing would take its place, it is given the whole limit.
"""

MakeJob = Callable[[Worker, int], RankJob]
"""Returns the job of a rank in a generation."""


class Supervisor(SimpleElasticAgent):
    """Agent that runs a function in this host's ranks, again after each failure, until all have returned."""

    def __init__(
        self,
        ranks: int,
        settings: Elastic,
        rendezvous: OneHostRendezvous | SeveralHostsRendezvous,
        start_member: Callable[[int], SupervisedProcess],
        make_job: MakeJob,
        folder: str,
        limit: float,
    ) -> None:
        """`ranks`: of this host. `folder`: of this run and host only.

        `limit`: seconds without progress, after which a rank hangs.
        """
        spec = WorkerSpec(
            role="plait",
            local_world_size=ranks,
            rdzv_handler=rendezvous,
            entrypoint="plait",
            max_restarts=settings.restarts,
            monitor_interval=1e-3,
        )
        super().__init__(spec)
        self._wanted, self._settings, self._host = ranks, settings, rendezvous
        self._start_member, self._make_job, self._folder = start_member, make_job, folder
        self._limit = limit
        share = _SHARE_OF_LIMIT if settings.replace else 1.0
        self._patience = min(max(_LEAST_PATIENCE, share * limit), _MOST_PATIENCE)
        """Seconds for a rank to leave a failed world; then its process is killed."""
        self._started = 0
        """The number of processes that were started, without those in the place of `left_by_ending` ones."""
        self._running: list[SupervisedProcess] = []
        """The processes of the ranks, by local rank."""
        self._ranks_here: list[int] = []
        """The ranks of the world on this host, in the same order."""
        self._spares: list[SupervisedProcess] = []
        self._ready_spares = 0
        """Those that were counted last, for a larger world."""
        self._possible = 0
        """The ranks of a larger world, as they were written for the ranks; 0: there is none."""
        self._seen = Counter[tuple[str, int | None]]()
        self.cause: RankFailure | None = None
        """The failure that the last generation ended by."""

    def results(self) -> list[bytes]:
        """Run until the function has returned on all ranks of one generation; return the pickled results.

        Raises the error of the failure that ends the run.
        """
        if self._grows_later and isinstance(self._host, SeveralHostsRendezvous):
            # A host that comes back waits for the end of a step: its processes are ready then.
            self._spares = [self._new_member() for _ in range(self._wanted)]
        result: RunResult | None = self.run()
        if result is None:  # this host was a spare one, and the others have finished
            return []
        assert result.state is WorkerState.SUCCEEDED, "the failure that ends a run is raised"
        return [one.report for one in self._running if isinstance(one.report, bytes)]

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return the ranks of this host, in place of torch's: supervisors have agreed on them already."""
        ranks, size = self._host.ranks(spec.local_world_size)
        spec.local_world_size = len(ranks)
        return [Worker(number, rank, rank, size, size) for number, rank in enumerate(ranks)]

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """Return an event of torch's log without the host's full name, in place of torch's.

        torch asks a name server for it for each event, several times in a restart; nothing of plait reads it.
        """
        about: dict[str, Any] = {"run_id": self._host.get_run_id(), "hostname": socket.gethostname()}
        return Event(f"torchelastic.worker.status.{state}", source, metadata=about | {"state": state})

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the jobs of the next generation; return the process of each local rank."""
        workers: Sequence[Worker] = worker_group.workers
        self._note_elsewhere()
        self._take_places(len(workers))
        self._ranks_here = [worker.global_rank for worker in workers]
        self._ready_spares = self._possible = 0
        note_possible_ranks(self._folder, 0)
        for worker, member in zip(workers, self._running, strict=True):
            member.start(self._make_job(worker, self._host.generation))
        while self._may_start(len(workers) + len(self._spares)):
            self._spares.append(self._new_member())
        return {number: one.process.pid for number, one in enumerate(self._running)}

    def _take_places(self, size: int) -> None:
        """Assign ranks to `size` processes: living ones keep theirs, spares and new processes fill gaps."""
        before = [*self._running, *self._spares]
        spares = sorted(self._spares, key=lambda one: not one.is_ready)
        others = iter([*self._running[size:], *spares])
        places = [*self._running[:size], *[None] * (size - len(self._running))]
        self._running = [
            one
            if one is not None and not one.has_ended
            else next((other for other in others if not other.has_ended), None) or self._new_member()
            for one in places
        ]
        self._spares = [one for one in others if not one.has_ended]
        for spare in self._spares:
            spare.become_spare()
        for lost in before:
            if lost.has_ended:
                self._started -= lost.left_by_ending
                lost.close()

    def _may_start(self, processes: int) -> bool:
        """Return whether one more process may be started, by `Elastic.replace` and how many there are."""
        most = self._wanted + self._settings.spares
        return processes < most and (bool(self._settings.replace) or self._started < most)

    def _new_member(self) -> SupervisedProcess:
        self._started += 1
        return self._start_member(self._started - 1)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the jobs that run, on the living ranks by errors; choose the number of ranks to go on with."""
        self._note_elsewhere()
        for member in self._running:
            member.stop()
        deadline = time.monotonic() + self._patience  # a busy rank that has more to do first is lost, too
        while (busy := [one for one in self._running if one.is_busy]) and time.monotonic() < deadline:
            self._update(min(_PERIOD, deadline - time.monotonic()), busy)
        for member in busy:
            self._tell(f"process {member.process.pid} does not leave the failed run, and is killed")
            member.send_kill()
        for member in busy:
            member.kill()
        self._note_wrong_bits()
        self._update(0.0, self._spares)
        worker_group.spec.local_world_size = self._next_size()

    def _next_size(self) -> int:
        """Return the number of ranks of the next generation. Raises the last failure for too few.

        Where no rank's process goes on, as on GPUs, a smaller world would begin no earlier: new ones are
        awaited. A host that had no ranks has its ready spares to offer.
        """
        go_on = sum(not one.has_ended for one in self._running)
        left = go_on + sum(one.left_by_ending for one in self._running)
        left += sum(not one.has_ended for one in self._spares)
        ready = self._wanted
        if self._grows_later and (go_on or not self._running):
            ready = go_on + self._count_ready_spares()
        elif not self._settings.replace:
            ready = left
        if isinstance(self._host, SeveralHostsRendezvous):  # all hosts together choose it
            self._host.ready = min(ready, self._wanted)
            return self._host.ready
        size = self._ranks_of(ready)
        if not size and self._settings.replace:  # nothing else is to be done meanwhile
            size = self._ranks_of(self._wanted)
        if not 0 < size <= self._wanted:
            assert self.cause is not None, "ranks were lost"
            raise self.cause.exception(f"{left} processes are left, too few to go on with.")
        return size

    @property
    def _grows_later(self) -> bool:
        """Whether a smaller world becomes larger again between two steps."""
        return self._settings.replace == "later"

    def _ranks_of(self, processes: int) -> int:
        """Return how many ranks `Elastic.ranks_of` allows for so many processes; 0: too few."""
        most, ranks_of = min(processes, self._wanted), self._settings.ranks_of
        if ranks_of is None or not most:
            return most
        try:
            count = whole(f"Elastic's ranks_of({most})", ranks_of(most), MeshError, least=0)
        except PlaitError:
            raise
        except Exception as error:
            raise MeshError(
                f"Elastic's ranks_of({most}) raised {error!r}: let it return a number of ranks, or 0."
            ) from error
        return count if count <= most else 0

    def _count_ready_spares(self) -> int:
        return sum(one.is_ready and not one.has_ended for one in self._spares)

    def _note_larger_world(self) -> None:
        """Write for the ranks how many they could be, where new processes have become ready for more."""
        if not self._grows_later:
            return
        ready, now = self._count_ready_spares(), len(self._running)
        if isinstance(self._host, SeveralHostsRendezvous):  # all hosts together
            size = self._host.larger_world(min(now + ready, self._wanted))
        elif ready != self._ready_spares:
            size = self._ranks_of(now + ready)
        else:
            return
        self._ready_spares, before = ready, self._possible
        self._possible = size if size > now else 0
        if self._possible != before:
            note_possible_ranks(self._folder, self._possible)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Block until something happens, a moment at most; return whether a rank failed or all have ended."""
        self._update(_PERIOD, [*self._running, *self._spares], self._host.handles)
        self._fail_hanging()
        if self._failures():
            cause = self._cause()
            if not (cause.secondary and self._host.reason()):  # else another host's rank has caused it
                self.cause = cause
                self._note(cause)
                return RunResult(state=WorkerState.FAILED)
        if self._host.reason():
            return RunResult(state=WorkerState.HEALTHY)  # torch asks the host by itself, and restarts
        results = {number: one.report for number, one in enumerate(self._running) if one.report is not None}
        if len(results) < len(self._running) or not self._running:
            self._note_larger_world()
        if len(results) < len(self._running):
            return RunResult(state=WorkerState.HEALTHY)
        if any(isinstance(report, RankFailure) for report in results.values()):
            before = self._host.ranks(len(self._running))[1]
            self._restart_workers(worker_group)
            now = self._host.ranks(len(self._running))[1]
            self._tell(f"the run goes on with {now} ranks in place of {before}")
            return RunResult(state=WorkerState.HEALTHY)
        if not self._host.finish([one for one in results.values() if isinstance(one, bytes)]):
            return RunResult(state=WorkerState.HEALTHY)
        ranks = [worker.global_rank for worker in worker_group.workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _failures(self) -> list[RankFailure]:
        """Return the failures of ranks, without those that only left their world for a larger one."""
        reports = [one.report for one in self._running]
        return [one for one in reports if isinstance(one, RankFailure) and not one.is_world_change]

    def _cause(self) -> RankFailure:
        """Wait a moment for all reports, and return the failure that caused the others."""
        deadline = time.monotonic() + _GRACE
        while True:
            failures = self._failures()
            waiting = [one for one in self._running if one.report is None]
            first, left = root_cause(failures), deadline - time.monotonic()
            may_come = waiting or isinstance(self._host, SeveralHostsRendezvous)
            if not first.secondary or not may_come or left <= 0 or self._host.reason():
                return first
            self._update(left, waiting, self._host.handles)

    def _fail_hanging(self) -> None:
        """Kill the ranks that hang: for the limit they are stopped, or others wait for them in vain.

        Where all wait for each other, the one that has waited longest counts as the one that failed.
        """
        idle = [(found, one) for one in self._running if (found := one.idle_for(self._limit)) is not None]
        waiting = [(found, one) for found, one in idle if found.waits and not one.is_stopped]
        others = f", while another waits for {waiting[0][0].awaited}" if waiting else ""
        are_all = len(waiting) == sum(one.report is None for one in self._running)
        wait_elsewhere, are_all_elsewhere = self._host.exchange_waiting(bool(waiting), are_all)
        for _, member in (pair for pair in idle if pair not in waiting):
            if waiting or wait_elsewhere or member.is_stopped:
                member.fail(f"made no progress for {self._limit:g} s{others}")
        if waiting and are_all and are_all_elsewhere:
            (_, _, awaited), member = min(waiting, key=lambda pair: pair[0].since)
            member.fail(f"has waited for {awaited} for {self._limit:g} s, and no rank made progress")

    def _note(self, cause: RankFailure) -> None:
        """Print a failure; raise its error where the run ends by it.

        That is where it is final, happens the third time at one step, or is one more than `Elastic.restarts`.
        """
        if cause.is_final:
            raise cause.exception()
        what, step = f"rank {cause.rank} {cause.summary}", restored_step(self._folder)
        # All ranks may raise one error, and a lost connection is told with other numbers each time.
        same = ("a connection" if cause.secondary else cause.summary if cause.traceback else what), step
        self._seen[same] += 1
        if self._seen[same] >= _SAME_FAILURES:
            place = "" if step is None else f" after step {step}, from which the run went on"
            raise cause.exception(f"That has happened {_SAME_FAILURES} times{place}, so the run ends.")
        if (count := self._seen.total()) > self._settings.restarts:
            most = f"of which Elastic's restarts allow {self._settings.restarts}"
            raise cause.exception(f"That was failure number {count} of the run, {most}, so the run ends.")
        error = cause.exception()
        if isinstance(error, CorruptionError):
            self._leave_out_wrong(cause, error)
        else:
            self._host.report(cause, None)
        self._tell(f"{what.splitlines()[0]}; the ranks go on from where the run was kept last")
        if cause.traceback and cause.error is None and not cause.secondary:  # a PlaitError is one sentence
            _print(cause.traceback.rstrip())

    def _note_wrong_bits(self) -> None:
        """Handle the CorruptionErrors that ranks raised besides the failure that ended the generation."""
        for failure in self._failures():
            error = failure.exception()
            if failure is not self.cause and isinstance(error, CorruptionError):
                self._tell(f"rank {failure.rank} {failure.summary.splitlines()[0]}")
                self._leave_out_wrong(failure, error)

    def _leave_out_wrong(self, failure: RankFailure, error: CorruptionError) -> None:
        """Exclude states with wrong bits from loading on all hosts; replace the wrong ranks of this host."""
        self._host.report(failure, error.last_good_step, error.ranks)
        go_on_before(self._folder, error.last_good_step)
        self._replace_wrong(error.ranks)

    def _replace_wrong(self, ranks: Sequence[int]) -> None:
        """Kill the processes of ranks that are wrong: others take their places, in other memory."""
        world = self._host.ranks(len(self._running))[1]
        if self._settings.replace or len(ranks) < world:
            for rank in set(ranks) & set(self._ranks_here):
                process = self._running[self._ranks_here.index(rank)]
                process.kill()
                process.left_by_ending = False  # no other process is counted in its place

    def _note_elsewhere(self) -> None:
        """Print why other hosts made this one stop; after wrong bits also limit what ranks may load."""
        reason, failure = self._host.reason(), self._host.failure_elsewhere()
        if failure is not None:
            reason, last_good_step, ranks = failure
            if last_good_step is not None:
                go_on_before(self._folder, last_good_step)
            self._replace_wrong(ranks)
        if reason and not self._host.is_closed():
            self._tell(f"{reason}; the ranks go on from where the run was kept last")

    def _update(
        self, seconds: float, members: Sequence[SupervisedProcess], others: Sequence[int] = ()
    ) -> None:
        """Block until one of `members` sends something or ends, at most `seconds`; take all messages.

        `others`: file descriptors that end the wait, too.
        """
        handles = [handle for one in members if not one.has_ended for handle in one.handles]
        wait([*handles, *others], seconds)
        for member in members:
            member.update()

    def _tell(self, text: str) -> None:
        _print(f"plait: {text}.")

    def _shutdown(self, death_sig: Signals = SIGTERM, timeout: int = 30) -> None:
        """End all processes."""
        members = [*self._running, *self._spares]
        try:
            for member in members:
                member.end()
            deadline = time.monotonic() + _GRACE
            for member in members:
                member.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also after a second Ctrl-C: ranks ignore SIGTERM, and this process would wait for them
            for member in members:
                member.send_kill()
            for member in members:
                member.close()


def _print(text: str) -> None:
    """Print to stderr; what reads it may be gone, and the run goes on."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
