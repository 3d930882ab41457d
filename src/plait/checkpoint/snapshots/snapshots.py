"""`Snapshots`: copies of a run's state in shared memory, from which restarted ranks go on."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

from plait.checkpoint.loading import (
    Loaded,
    checked_optimizers,
    load_files,
    needed_boxes,
    raising_on_all_ranks,
)
from plait.checkpoint.manifest import Manifest, manifest_text
from plait.checkpoint.optimizer_options import Options, option_line
from plait.checkpoint.optimizer_set import GivenOptimizers, OptimizerSet
from plait.checkpoint.rank_contents import Checkpointable, require_engine
from plait.checkpoint.save_task import file_name
from plait.checkpoint.snapshots.host_exchange import fetch_files, files_for_next_host, files_to_fetch
from plait.checkpoint.snapshots.snapshot_buffer import RankContents, SnapshotBuffer, manifest_name
from plait.checkpoint.snapshots.snapshot_folder import HALVES, SnapshotFolder
from plait.checkpoint.snapshots.snapshot_parts import (
    RankPart,
    SnapshotName,
    found_parts,
    has_all_states,
    has_whole_tensors,
    is_right,
    merged_manifest,
    newest_first,
    parts_of_text,
    text_of_parts,
)
from plait.errors import CheckpointError, CorruptionError, PlaitError, terminal_text
from plait.plan.argument_checks import require_instance, require_path, require_whole
from plait.ranks.exchange_with_supervisor import (
    WorldChange,
    newest_good_step,
    note_begun_anew,
    note_restored,
    possible_ranks,
    remove_at_end,
    supervised_run,
    supervisor_of_rank,
)
from plait.ranks.failure.rank_failure import is_secondary
from plait.ranks.launch.rank_threads import join_thread
from plait.ranks.launcher_processes import process_identity, process_of_agent
from plait.ranks.run_kept_in_memory import KeptRun, keep_run, keeps_runs, take_moved_run
from plait.ranks.text_collectives import all_gather_text

SHARED_MEMORY = Path("/dev/shm")
"""Linux's folder in memory."""


class Restored(NamedTuple):
    """What was restored from memory besides parameters and optimizer state."""

    step: int
    """The number of finished steps."""
    state: dict[str, Any]
    """The user's own state."""


class Snapshots:
    """Copies a run's state into shared memory every few steps, from which restarted ranks go on.

    Shared memory outlives processes, but not its host. Two snapshots are kept, so that one is always
    complete; each host keeps what its ranks hold, once, and a copy of what only the host before has.
    """

    def __init__(
        self,
        engine: Checkpointable,
        optimizer: GivenOptimizers,
        *,
        every: int = 10,
        name: str | None = None,
        folder: str | Path = SHARED_MEMORY,
    ) -> None:
        """Make or find the run's folder in `folder`, which is in memory. Called on all ranks.

        `every`: steps between two snapshots. `name` identifies the run: started again under the same name, on
        the same hosts, it finds its snapshots. None: torchrun's agent does, or the supervisor of elastic
        ranks, so that the ranks which it restarts find them, and no others. What this user's ended runs have
        left in `folder` is removed.
        `optimizer`: one, a list of several, or None. Raises `CheckpointError` on all ranks where `folder`
        cannot be used, or another process uses the name. Communication: an all-gather of 100 bytes a rank.
        """
        require_engine(engine)
        require_whole("every", every, CheckpointError)
        require_path("folder", folder, CheckpointError)
        agent = supervisor_of_rank() or process_of_agent()
        if name is not None:
            require_instance("the name of a run", name, str, "give a text", CheckpointError)
        elif not agent:
            raise CheckpointError(
                "snapshots have no name, and neither torchrun nor launch(…, elastic=True) restarts ranks: "
                "give Snapshots a name, by which a later run finds them."
            )
        self._engine, self._optimizer, self._every = engine, optimizer, every
        self._owner = agent or process_identity(os.getpid())
        self._restarted_by = supervised_run() or self._owner
        """The same for all ranks of the run on one host, under a supervisor on all hosts."""
        self._folder = SnapshotFolder(Path(folder), agent if name is None else f"run {name}")
        self._ranks_here, self._attempt = self._take_folder()
        self._buffer = SnapshotBuffer(self._folder, engine.mesh.rank)
        self._half = 1
        """The half that was written last."""
        self._cleared: set[int] = set()
        """The halves without snapshots of an earlier attempt."""
        self._reserved: set[int] = set()
        """The halves for which all ranks have memory."""
        self._goes_on = False
        """Whether the run goes on from a snapshot."""
        self._last: RankContents | None = None
        self._is_copied = len(self._ranks_here) == engine.mesh.world
        """Whether another host has a copy of the last snapshot, or there is none."""
        self._thread: Thread | None = None
        self._error = ""
        self._finished: KeptRun | None = None
        """The run after the last step, until an optimizer begins the next update."""
        self._watch_updates()

    def _watch_updates(self) -> None:
        """Add hooks by which a beginning update discards the stored run, which is then within a step."""
        chosen = OptimizerSet.of(self._optimizer) if keeps_runs() else None
        members = () if chosen is None else chosen.members
        self._hooks = [one.register_step_pre_hook(lambda *_: self._note_finished(None)) for one in members]

    def _note_finished(self, step: int | None, state: Mapping[str, Any] | None = None) -> None:
        """Store engine and optimizer as a run after `step` finished steps; None: the run is within a step."""
        self._finished = None
        if step is not None and keeps_runs():
            own, run_state = dict(state or {}), dict(self._engine.run_state)
            self._finished = KeptRun(self._engine, self._optimizer, step, own, run_state)

    @property
    def folder(self) -> Path:
        """This host's folder of the run's snapshots."""
        return self._folder.path

    def is_due(self, number: int) -> bool:
        """Return whether a snapshot is taken after `number` finished steps."""
        return number % self._every == 0

    @property
    def bytes_copied(self) -> int:
        """The bytes that this rank has copied into shared memory so far."""
        return self._buffer.bytes_copied

    def step(self, number: int, state: Mapping[str, Any] | None = None, *, leaves: bool = True) -> bool:
        """Take a snapshot after `number` finished steps if it is a multiple of `every`; return whether it is.

        Called on all ranks between steps; gradients are not saved. `state`: your own, as JSON holds it, the
        same on every rank; `restore` returns it. `leaves`: whether the ranks may leave their world for a
        larger one, which they need not after a run's last step. When this returns, training may go on: all
        is copied. The snapshot counts once a thread has computed checksums, at the latest when the next one
        is taken. Raises `CheckpointError` on all ranks where one has no room, or could not write the
        snapshot before; an older one is then unchanged. Communication: an all-reduce of 8 bytes over
        `world`; in the first two, four. Over several hosts the one before is copied: each sends what no
        other holds to the next.

        Where the supervisor of elastic ranks has processes for more of them, it raises `WorldChange` on all
        ranks after the snapshot, so that the function is called again on all. A function that calls
        `reshard_kept` also calls this after steps that are no multiple.
        """
        self._note_finished(number, state)
        if not self.is_due(number):
            return False
        about = {"step": number, "attempt": self._attempt, "ranks": self._engine.mesh.world}
        about |= {"rank": self._engine.mesh.rank, "restarted_by": self._restarted_by}
        contents, error = None, ""
        try:
            optimizers = OptimizerSet.of(self._optimizer)
            about |= {"state_ranks": [] if optimizers is None else optimizers.state_ranks()}
            own = {"snapshot": about, "state": dict(state or {})}
            contents = RankContents.of(self._engine, optimizers, self._ranks_here, own, self._last)
        except Exception as raised:  # any error: the other ranks wait
            error = str(raised) if isinstance(raised, PlaitError) else repr(raised)
        possible = self._finish(error)
        assert contents is not None, "_finish has raised the error"
        self._last = contents
        half = 1 - self._half
        self._make_room(half, contents.layout.bytes)
        self._half, self._is_copied = half, len(self._ranks_here) == self._engine.mesh.world
        try:
            self._buffer.copy(half, contents)
        except (CheckpointError, OSError) as raised:
            self._error = str(raised)  # `_finish` raises it on all ranks
        else:
            self._thread = Thread(target=self._commit, args=(contents,), name="plait-snapshot", daemon=True)
            self._thread.start()
        if leaves and possible > self._engine.mesh.world:
            self.release()
            if self._finished is not None:
                keep_run(self._finished)
            raise WorldChange(f"leaves the world after step {number}, for one of {possible} ranks")
        return True

    def finish(self) -> None:
        """Block until the last snapshot is complete on all ranks, which all call this.

        Raises `CheckpointError` on all ranks where it is not. Communication: an all-reduce of 8 bytes.
        """
        self._finish("")

    def go_on_with(self, engine: Checkpointable, optimizer: GivenOptimizers) -> None:
        """Take later snapshots of another engine and optimizer, which `plait.reshard` returned.

        Those of before stay until newer ones take their place. Communication and errors: as `finish`.
        """
        self.finish()
        self._forget_updates()
        self._engine, self._optimizer, self._last = engine, optimizer, None
        self._reserved.clear()
        self._watch_updates()

    def _finish(self, error: str) -> int:
        """Finish the last snapshot; raise on all ranks where one did not write it, or gives an `error`.

        Returns the number of ranks of a larger world that is possible, the same on all; 0: none.
        """
        if self._thread is not None:
            join_thread(self._thread)
            self._thread = None
        failed, self._error = self._error, ""
        possible = possible_ranks()
        texts = self._all_gather(json.dumps([failed, error, possible]) if failed or error or possible else "")
        told = [json.loads(text) for text in texts if text]
        if any(failed for failed, _, _ in told):
            self._half = 1 - self._half  # the one before is still complete
        if errors := [failed or error for failed, error, _ in told if failed or error]:
            raise CheckpointError(errors[0])
        if self._last is not None and not self._is_copied:
            self._copy_to_next_host()
            self._is_copied = True
        return max((possible for _, _, possible in told), default=0)

    def restore(self, options: Options = "saved", *, own_launch: bool = False) -> Restored | None:
        """Load the newest snapshot that all ranks of the run have completed; None where there is none.

        Called on all ranks, whose plan and number may differ from those of before. `own_launch`: only one of
        ranks that the same torchrun restarted. `options`: as for `plait.load`. One that is damaged is
        left out; rank 0 prints why. Nothing is loaded where `reshard_kept` has moved the run from before.
        Raises `CheckpointError` on all ranks where it is of another model or optimizer. Communication: names
        of snapshots, error messages, files that other hosts have.
        """
        is_first = self._engine.mesh.rank == 0

        def tell(line: str) -> None:
            print(terminal_text(line)) if is_first else None

        found = self.load_newest(options, tell, own_launch=own_launch)
        if found is None:
            note_begun_anew()  # those with wrong bits are withdrawn: the limit is not for what comes now
            return None
        step, loaded = found
        if loaded.options:
            tell(option_line(loaded.options, options))
        return Restored(step, loaded.state)

    def load_newest(
        self, options: Options, tell: Callable[[str], None], *, own_launch: bool, after: int = -1
    ) -> tuple[int, Loaded] | None:
        """Load as `restore` does; return the finished steps and the differences; None without a snapshot.

        `tell` is called with lines for the user. `after`: only a snapshot of more steps.
        """
        self.finish()
        optimizers, most = checked_optimizers(self._engine, self._optimizer, options), newest_good_step()
        parts = [
            part
            for part in found_parts(self._folder, self._ranks_here[0])
            if not own_launch or part.restarted_by == self._restarted_by
        ]
        parts, found = self._without_wrong(parts, most)
        if (moved := take_moved_run(self._engine)) is not None:
            whole = (name for name, is_complete in found if is_complete)
            halves = (part.half for name in whole for part in parts if part.name == name)
            self._go_on(moved.step, moved.state, next(halves, self._half))
            return moved.step, Loaded(dict(moved.state), {})
        for name, is_complete in found:
            if name.step <= after:
                break
            own = [part for part in parts if part.name == name]
            half = own[0].half if own else 0
            manifest = self._manifest_here(own, half, optimizers, is_complete=is_complete)
            if manifest is None:
                continue
            try:
                folder = self._folder.half(half)
                loaded = load_files(self._engine, optimizers, manifest, folder, options, self._ranks_here)
            except CheckpointError as error:
                if not error.damaged:
                    raise
                tell(f"WARNING: the snapshot of step {name.step} in memory is left out: {error}")
                continue
            self._go_on(name.step, loaded.state, half)
            # Later ones, damaged or of hosts that are gone, would count again where such a host comes back.
            self._withdraw([part for part in parts if part.name.step > name.step])
            return name.step, loaded
        return None

    def _without_wrong(
        self, parts: list[RankPart], most: int | None
    ) -> tuple[list[RankPart], list[tuple[SnapshotName, bool]]]:
        """Withdraw snapshots with wrong bits; return the other `parts` here, and the snapshots of all hosts.

        `most`: the last right step, as this host was told: one without ranks may know of a failure of long
        ago. What ranks of other hosts have found wrong is wrong here, too: replicas and copies.
        """
        own = [part for part in parts if is_right(part.name, {}, most)]
        names = [[part.rank, *vars(part.name).values()] for part in own]
        text = json.dumps([names, self._folder.wrong_states()] if self._leads else [[], {}])
        told = [json.loads(text) for text in self._all_gather(text)]
        wrong: dict[str, int] = {}
        for attempt, step in (pair for _, states in told for pair in states.items()):
            wrong[attempt] = min(step, wrong.get(attempt, step))
        right = [part for part in own if is_right(part.name, wrong)]
        self._withdraw([part for part in parts if part not in right])
        everywhere = ((rank, SnapshotName(*name)) for names, _ in told for rank, *name in names)
        return right, newest_first((rank, name) for rank, name in everywhere if is_right(name, wrong))

    def _go_on(self, step: int, state: Mapping[str, Any], half: int) -> None:
        """Set the finished steps after a restore; `half`, from which it was read, is not overwritten next."""
        self._half, self._goes_on = half, True
        self._note_finished(step, state)
        note_restored(step)

    def _withdraw(self, parts: Sequence[RankPart]) -> None:
        """Remove the manifests of parts of snapshots, so that these are not restored."""
        with raising_on_all_ranks(self._engine.mesh):
            for part in parts if self._leads else ():
                self._folder.withdraw(part.half, manifest_name(part.rank))

    def clear(self) -> None:
        """Remove all snapshots that this run has written before, so that none is loaded. All ranks call it.

        The first `step` does so, too, unless `restore` has found a snapshot.
        """
        with raising_on_all_ranks(self._engine.mesh):
            self._clear(set(HALVES))

    def _clear(self, halves: set[int]) -> None:
        """Remove all files from halves but those that this attempt writes again. Raises OSError."""
        for half in halves if self._leads else ():
            self._folder.clear(half, [file_name(rank) for rank in self._ranks_here])
        self._cleared |= halves

    def close(self) -> None:
        """Remove the run's snapshots, when it has ended as planned. Called on all ranks.

        Where a supervisor restarts ranks, it does so once all have ended.
        """
        self.finish()
        self._forget_updates()
        if not self._leads:
            return
        if remove_at_end(self.folder):
            self._folder.release()
        else:
            self._folder.remove()

    def release(self, error: BaseException | None = None) -> None:
        """Keep the run's snapshots, and let another object or process use its name; without communication.

        Blocks until this rank's part of the last one is written. Where `error` says that another rank is
        lost, the run itself is kept for `reshard_kept`, if no update has begun, and no buffers are there that
        a forward may have changed.
        """
        self._forget_updates()
        is_lost = error is not None and is_secondary(error)
        if self._finished is not None and is_lost and not any(self._engine.named_buffers()):
            keep_run(self._finished)
        if self._thread is not None:
            join_thread(self._thread)
        self._folder.release()

    def withdraw_after(self, step: int) -> None:
        """Exclude snapshots of more than `step` steps from restoring, since their bits may be wrong.

        Without communication: any rank may call it. Those on this host at once; those on others when ranks
        restore next, on all hosts that are there.
        """
        if self._thread is not None:
            join_thread(self._thread)
        wrong = [part for part in found_parts(self._folder, self._ranks_here[0]) if part.name.step > step]
        attempts = {self._attempt, *(part.name.attempt for part in wrong)}
        with suppress(OSError):  # what cannot be written or removed is not to hide the error of wrong bits
            self._folder.note_wrong(self._engine.mesh.rank, attempts, step)
        for part in wrong:
            with suppress(OSError):
                self._folder.withdraw(part.half, manifest_name(part.rank))

    def _forget_updates(self) -> None:
        """Remove the hooks that `_watch_updates` added to the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the snapshots; after an error, after which ranks may be restarted, keep them.

        But not those whose bits may be wrong, by a CorruptionError.
        """
        if error is None:
            self.close()
            return
        if isinstance(error, CorruptionError):
            self.withdraw_after(error.last_good_step)
        self.release(error)

    @property
    def _leads(self) -> bool:
        """Whether this is the first of the ranks that share a folder."""
        return self._ranks_here[0] == self._engine.mesh.rank

    def _take_folder(self) -> tuple[tuple[int, ...], str]:
        """Make this host's folder; return the ranks that share it, and a text that names this attempt."""
        mesh = self._engine.mesh
        with raising_on_all_ranks(mesh):
            own = self._folder.make()
        rows = [json.loads(text) for text in self._all_gather(json.dumps([own, secrets.token_hex(8)]))]
        ranks = tuple(rank for rank, (identity, _) in enumerate(rows) if identity == own)
        with raising_on_all_ranks(mesh):
            if ranks[0] == mesh.rank:
                self._folder.take(self._owner)
                self._folder.remove_ended()
        return ranks, rows[0][1]

    def _make_room(self, half: int, size: int) -> None:
        """Before a half is written for the first time, clear it, and reserve `size` bytes on this rank."""
        if half in self._reserved:
            return
        with raising_on_all_ranks(self._engine.mesh):
            self._clear(({half} if self._goes_on else set(HALVES)) - self._cleared)
        with raising_on_all_ranks(self._engine.mesh):
            self._buffer.reserve(half, size)
        self._reserved.add(half)

    def _copy_to_next_host(self) -> None:
        """Copy the parts of the last snapshot that only this host has to the next host, as a backup."""
        mesh, host, half = self._engine.mesh, self._ranks_here[0], self._half
        own = [
            part
            for part in (found_parts(self._folder, host) if self._leads else ())
            if (part.half, part.name.attempt) == (half, self._attempt) and part.rank in self._ranks_here
        ]
        texts = self._all_gather(text_of_parts(own) if self._leads else "")
        parts = [part for text in texts for part in parts_of_text(text)]
        wanted = files_for_next_host(parts, host)
        copied = fetch_files(wanted, parts, mesh, self._folder, half, host)
        with raising_on_all_ranks(mesh):
            for part in copied if self._leads else ():
                self._folder.publish(half, manifest_name(part.rank), manifest_text(part.manifest))

    def _commit(self, contents: RankContents) -> None:
        """Complete this rank's part of a snapshot, in a thread."""
        try:
            self._buffer.commit(self._half, contents)
        except Exception as raised:  # any error: `finish` raises it on all ranks
            self._error = f"rank {self._engine.mesh.rank}: the snapshot was not written ({raised!r})."

    def _manifest_here(
        self, own: list[RankPart], half: int, optimizers: OptimizerSet | None, *, is_complete: bool
    ) -> Manifest | None:
        """Return the manifest of a snapshot, with all files that this host's ranks need; None if one lacks.

        `own`: the parts that are here; what other hosts have, and ranks here need, is copied to `half`.
        `is_complete`: the parts of all ranks are there; else others have to hold the same boxes.
        """
        mesh, host = self._engine.mesh, self._ranks_here[0]
        if len(self._ranks_here) == mesh.world:
            return merged_manifest(own, own) if is_complete else None
        texts = self._all_gather(text_of_parts(own) if self._leads else "")
        parts = [part for text in texts for part in parts_of_text(text)]
        everything = merged_manifest(parts, parts)
        shard_plan = self._engine.shard_plan
        if not is_complete and not (has_all_states(parts) and has_whole_tensors(everything, shard_plan)):
            return None
        needed = needed_boxes(self._engine, optimizers, everything)
        wanted = files_to_fetch(parts, needed, host)
        return merged_manifest(parts, [*own, *fetch_files(wanted, parts, mesh, self._folder, half, host)])

    def _all_gather(self, text: str) -> list[str]:
        return all_gather_text(text, self._engine.mesh.group("world"), self._engine.mesh.device)
