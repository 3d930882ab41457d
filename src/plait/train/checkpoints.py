"""`run.resume`, `run.save_every` and what belongs to them: the checkpoints of a training run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.folders import complete_checkpoints
from plait.checkpoint.loading import load
from plait.checkpoint.manifest import section
from plait.comm.mesh import Mesh
from plait.comm.news import tell
from plait.errors import CheckpointError, ConfigError, NonFiniteError, ReplicaError, listed
from plait.train.config import Config
from plait.train.progress import Follower
from plait.train.trainer import Trainer

FOLDER = "checkpoints"
"""In `run.dir`."""
SAME = (
    "train.seed",
    "train.batch",
    "model.context",
    "data.source",
    "data.tokenizer",
    "data.dtype",
    "data.validation",
)
"""Fields that say which tokens a step sees: with others a run would not go on where it stopped."""
SETTINGS = ("weight_decay", "betas", "eps")
"""Options of the optimizer that a configuration may change at any time, as it may the learning rate."""


class RunCheckpoints:
    """The checkpoints of a run; every rank makes one, and calls its methods alike."""

    def __init__(self, config: Config, trainer: Trainer, mesh: Mesh, follower: Follower) -> None:
        self._config = config
        self._trainer = trainer
        self._mesh = mesh
        self._follower = follower
        self._folder = config.run.dir / FOLDER
        self._series: CheckpointManager | None = None
        self.behind = 0
        """Steps of this run whose checkpoints, and metrics, may be in `run.dir`."""
        self._told = False

    def resume(self) -> int:
        """Load what `run.resume` names; how many steps the run has behind it.

        With `auto` that is the newest checkpoint of the run that is not damaged, if there is one. Raises
        `CheckpointError`, and `ConfigError` where the data is not what it was.
        """
        wish = self._config.run.resume
        if wish == "no":
            return 0
        if wish != "auto":
            return self._load(Path(wish).expanduser())
        damaged: list[str] = []
        for path in self._own():
            try:
                return self._load(path)
            except CheckpointError as error:
                if not error.damaged:
                    raise
                self._follower.note(f"WARNING: {error}")
                damaged.append(path.name)
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged ({listed(damaged)}): mend one, or start anew "
                "with --run.resume no."
            )
        self._follower.note(f"There is no checkpoint in {self._folder}: the run starts anew.")
        return 0

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written."""
        return self._series is not None and not self._series.complete

    def after(self, step: int, *, last: bool) -> None:
        """After `step` steps: save where it is time to. What fails is told, and training goes on."""
        every = self._config.run.save_every
        if every is None or not (last or (every and step % every == 0)):
            self._tell_early()
            return
        state = {
            "step": step,
            "sequences": step * self._config.train.batch,
            "config": json.loads(self._config.model_dump_json()),
        }
        self.finish()
        self._try(lambda: self._open().save(self._trainer.engine, self._trainer.optimizer, step, state))

    def finish(self) -> None:
        """Return when nothing is under way any more."""
        if self._series is not None:
            self._try(self._series.finish)
            self._told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish, also where all ranks have met the same error: after another one some may not be there."""
        if error is None or isinstance(error, NonFiniteError | ReplicaError):
            self.finish()

    def _load(self, path: Path) -> int:
        optimizer = self._trainer.optimizer
        wished = [{name: group[name] for name in SETTINGS} for group in optimizer.param_groups]
        state = load(self._trainer.engine, optimizer, path)
        for group, options in zip(optimizer.param_groups, wished, strict=True):
            group.update(options)
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise CheckpointError(
                f"the checkpoint {path} does not say after how many steps it was written: give one of plait "
                "train, or of save with a state of {'step': …}."
            )
        self._refuse_other_data(state, path)
        if self._folder.resolve() in (path.resolve(), path.resolve().parent):
            self.behind = step
        self._follower.note(f"Resumed from {path}, after step {step}.")
        return step

    def _own(self) -> list[Path]:
        """The complete checkpoints of this run, newest first: those that rank 0 sees."""
        paths: list[str] | None = []
        if self._mesh.rank == 0:
            try:
                paths = [str(path) for _, path in complete_checkpoints(self._folder)]
            except OSError:  # the others wait
                paths = None
        told = json.loads(tell(json.dumps(paths), self._mesh.group("world"), self._mesh.device))
        if told is None:
            raise CheckpointError(f"{self._folder} cannot be read: mend its permissions, or the disk.")
        return [Path(path) for path in told]

    def _open(self) -> CheckpointManager:
        """Where this run's checkpoints go, made when the first is written."""
        if self._series is None:
            run = self._config.run
            self._series = CheckpointManager(
                self._folder, keep_last=run.keep_last, keep_every=run.keep_every, behind=self.behind
            )
        return self._series

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except CheckpointError as error:
            if not self._told:
                self._follower.note(f"WARNING: {error}")

    def _tell_early(self) -> None:
        """Warn of a failure that rank 0 knows of before all ranks wait for the checkpoint, once."""
        flaw = "" if self._series is None else self._series.flaw
        if flaw and not self._told:
            self._told = True
            self._follower.note(f"WARNING: {flaw}")

    def _refuse_other_data(self, state: Mapping[str, Any], path: Path) -> None:
        """ConfigError where steps would see other data than those before them."""
        now = json.loads(self._config.model_dump_json())
        for field in SAME:
            part, _, name = field.partition(".")
            was = section(state, "config", part).get(name)
            if was is not None and was != now[part][name]:
                raise ConfigError(
                    f"{field} is {now[part][name]!r}, and was {was!r} when {path} was written: the data "
                    "would not go on where it stopped; give the same, or start anew without run.resume."
                )
