"""Failures that happen to a rank at a place of a step, drawn from a seed; the code of plait knows none of it.

An `Injector` patches plait's functions within a context, in a rank's process, or for all ranks that are
threads of one. Each failure happens once, also where the step is computed again.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from plait.checkpoint.snapshots import snapshot_buffer, snapshots
from plait.checkpoint.snapshots.snapshot_folder import SnapshotFolder
from plait.engine.engine import Engine
from plait.engine.pipeline.executor import Executor
from plait.engine.resharding import arriving_values
from plait.plan.plan import Plan
from plait.ranks.transport.process_ranks import current_ranks
from plait.schedules.lowering.program import Segment

Kind = Literal["kill", "stop", "error"]
PLACES = (
    "F",
    "I",
    "W",
    "gather",
    "reduce",
    "norm",
    "optimizer",
    "snapshot",
    "commit",
    "end",
    "restore",
    "leave",
    "reshard",
)
"""Where a failure happens: before an action or the start of a gather or a reduction (I, W: in schedules that
compute these apart), before the norm, after the optimizer's update, after the first tensor of a snapshot was
copied, before a rank's part of it is committed, when the run has closed its snapshots, and in the recovery
after the step's last failure: before snapshots are read, before the rank keeps its run for the next world, or
in the reshard there, when the first tensors have moved."""
RECOVERIES = ("restore", "leave", "reshard")
"""Those that follow another failure."""
_SEGMENTS = {"gather": r"gather ", "reduce": r"(scatter|reduce) "} | {
    kind: rf"\d+{kind}\d+$" for kind in ("F", "I", "W")
}


class Injected(Exception):
    """The error of an injection."""


@dataclass(frozen=True)
class Injection:
    """What happens to one rank, once."""

    kind: Kind
    place: str
    step: int
    """That which runs, counted from 0; of a restore or reshard, the step of the failure before."""
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} of step {self.step} on rank {self.rank}"


def drawn(seed: int, kind: Kind, plan: Plan, *, steps: int, every: int) -> list[Injection]:
    """Return a failure drawn from a seed, of a run with a snapshot after `every` steps; in a recovery two.

    Places and steps take turns, from seed to seed, so that consecutive ones have all places of a plan, and no
    rank is lost three times in one step, which would end the run.
    """
    dice, places = random.Random(seed), places_of(plan, kind)
    place, rank = places[seed % len(places)], dice.randrange(plan.world)
    step = 1 + seed % (steps - 2)
    if place == "end":
        step = steps - 1
    if place in ("snapshot", "commit"):
        step = min((step // every + 1) * every, (steps - 1) // every * every) - 1
    if place not in RECOVERIES:
        return [Injection(kind, place, step, rank)]
    before = Injection(kind, "norm", step, (rank + dice.randrange(1, plan.world)) % plan.world)
    return [before, Injection(kind, place, step, rank)]


def places_of(plan: Plan, kind: Kind) -> list[str]:
    """Return the places that a step by a plan has, and the recovery from a failure.

    Replicas are moved when a process is lost, so that snapshots are not restored.
    """
    has_replicas = plan.replicate > 1 or (plan.strategy == "none" and plan.dp > 1)
    moves = has_replicas and kind != "error"
    is_there = {
        "I": plan.schedule == "zb-h1",
        "W": plan.schedule == "zb-h1",
        "gather": plan.strategy == "full",
        "restore": not moves,
        "leave": kind != "error",
        "reshard": moves,
    }
    return [one for one in PLACES if is_there.get(one, True)]


class Injector:
    """Lets the `injections` happen, each once in the life of the folder."""

    def __init__(self, folder: Path, injections: Sequence[Injection]) -> None:
        self._folder, self._injections = folder, injections
        self._steps: dict[int, int] = {}
        """The step that each rank runs."""

    def begin(self, step: int) -> None:
        """Say that this rank begins a step."""
        self._steps[_rank()] = step

    def at(self, place: str, rank: int | None = None, step: int | None = None) -> None:
        """Let what is due at a place happen; by default to this rank, in its step."""
        rank = _rank() if rank is None else rank
        step = self._steps.get(rank) if step is None else step
        for one in self._injections:
            if (one.place, one.rank) != (place, rank):
                continue
            is_due = self._happened(one.step) if place in RECOVERIES else step == one.step
            if is_due and self._is_first(one):
                self._happen(one)

    def _happened(self, step: int) -> bool:
        return any(
            self._mark(one).exists()
            for one in self._injections
            if one.step == step and one.place not in RECOVERIES
        )

    def _is_first(self, one: Injection) -> bool:
        try:
            self._mark(one).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _mark(self, one: Injection) -> Path:
        return self._folder / str(one).replace(" ", "-")

    def _happen(self, one: Injection) -> None:
        self._mark(one).write_text(str(time.monotonic()))
        if one.kind == "error":
            raise Injected(str(one))
        os.kill(os.getpid(), signal.SIGKILL if one.kind == "kill" else signal.SIGSTOP)

    def happened_at(self) -> dict[Injection, float]:
        """Return the host's monotonic time of each injection that has happened."""
        return {
            one: float(mark.read_text()) for one in self._injections if (mark := self._mark(one)).exists()
        }

    @property
    def left(self) -> list[Injection]:
        """The injections that have not happened yet."""
        return [one for one in self._injections if not self._mark(one).exists()]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Context in which plait's functions tell this object where ranks are."""
        with ExitStack() as stack:
            for owner, name, changed in self._changes():
                stack.enter_context(patch.object(owner, name, changed))
            yield

    def _changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        run, copy = Executor.run, snapshot_buffer.copy_later

        def run_program(executor: Executor, program: Any, around: Any = None) -> None:
            @contextmanager
            def within(segment: Segment) -> Iterator[None]:
                for place, pattern in _SEGMENTS.items():
                    if re.match(pattern, segment.name):
                        self.at(place)
                with around(segment) if around else nullcontext():
                    yield

            run(executor, program, within)

        def copy_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
            copy(target, source)
            self.at("snapshot")

        def publish(folder: SnapshotFolder, half: int, name: str, text: str) -> None:
            about = json.loads(text)["content"]["state"]["snapshot"]  # the rank may have begun the next step
            self.at("commit", about["rank"], about["step"] - 1)
            publish_whole(folder, half, name, text)

        publish_whole = SnapshotFolder.publish
        yield Executor, "run", run_program
        yield snapshot_buffer, "copy_later", copy_tensor
        yield SnapshotFolder, "publish", publish
        yield Engine, "clip_grad_norm_", self._before("norm", Engine.clip_grad_norm_)
        yield snapshots, "load_files", self._before("restore", snapshots.load_files)
        yield snapshots, "keep_run", self._before("leave", snapshots.keep_run)
        exchange = arriving_values.exchange_boxes

        def exchange_boxes(*arguments: Any, **options: Any) -> None:
            exchange(*arguments, **options)
            self.at("reshard")

        yield arriving_values, "exchange_boxes", exchange_boxes

    def _before(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.at(place)
            return function(*arguments, **options)

        return call


def _rank() -> int:
    ranks = current_ranks()
    assert ranks is not None, "injections happen to ranks"
    return ranks.rank
