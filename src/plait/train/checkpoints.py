"""Checkpoints of a training run: `run.resume`, `run.save_every`, `run.keep_last` and `run.keep_every`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from plait.blueprint import build_blueprint
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.folders import complete_checkpoints
from plait.checkpoint.loading import load
from plait.checkpoint.manifest import Manifest, section
from plait.comm.mesh import Mesh
from plait.comm.text_collectives import broadcast_result
from plait.errors import CheckpointError, ConfigError, NonFiniteError, ReplicaError, listed
from plait.layout.shard_plan import ShardPlan
from plait.train.build import build_model
from plait.train.config import Config
from plait.train.config_parser import config_from_arguments
from plait.train.progress import ProgressReporter
from plait.train.trainer import Trainer

FOLDER = "checkpoints"
"""The folder in `run.dir`."""
DATA_FIELDS = (
    "train.seed",
    "train.batch",
    "model.context",
    "data.source",
    "data.mixture",
    "data.tokenizer",
    "data.dtype",
    "data.validation",
    "data.validation_source",
)
"""Fields that decide which tokens a step trains on; a resumed run has the same."""
OPTIMIZER_OPTIONS = ("weight_decay", "betas", "eps")
"""Options of the optimizer that a resumed run takes from its configuration, as it does the learning rate."""
_TOKEN_EMBEDDING = "model.embedding.token.weight"
"""In plait's own models: one row for each token."""


class RunCheckpoints:
    """Saves checkpoints of a training run and resumes it; every rank makes one and calls the same methods."""

    def __init__(self, config: Config, trainer: Trainer, mesh: Mesh, progress: ProgressReporter) -> None:
        self._config = config
        self._trainer = trainer
        self._mesh = mesh
        self._progress = progress
        self._folder = config.run.dir / FOLDER
        run = config.run
        self._manager = CheckpointManager(
            self._folder, keep_last=run.keep_last, keep_every=run.keep_every, start_step=0
        )
        self.resumed_steps = 0
        """Steps done before this run was resumed from a checkpoint in `run.dir`."""
        self._warned = False

    def resume(self) -> int:
        """Load the checkpoint that `run.resume` names, and return its number of steps; 0 without one.

        `auto` names the newest checkpoint of the run that is not damaged, if there is one. Raises
        `CheckpointError`, and `ConfigError` where the data has changed.
        """
        source = self._config.run.resume
        if source == "no":
            return 0
        if source != "auto":
            return self._load(Path(source).expanduser())
        damaged: list[str] = []
        for path in self._saved():
            try:
                return self._load(path)
            except CheckpointError as error:
                if not error.damaged:
                    raise
                self._progress.print(f"WARNING: {error}")
                damaged.append(path.name)
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self._folder} are damaged ({listed(damaged)}): mend one, or start over "
                "with --run.resume no."
            )
        self._progress.print(f"There is no checkpoint in {self._folder}: the run starts from the beginning.")
        return 0

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint could not be written."""
        return not self._manager.complete

    def are_due(self, step: int) -> bool:
        """Return whether a checkpoint is due because `step` is a multiple of `run.save_every`."""
        every = self._config.run.save_every
        return bool(every) and step % (every or 1) == 0

    def after(self, step: int, *, last: bool) -> None:
        """Unless `run.save_every` is None, save if `step` is due or `last`; print a failure as a warning."""
        if self._config.run.save_every is None or not (last or self.are_due(step)):
            self._warn_early()
            return
        state = {
            "step": step,
            "sequences": step * self._config.train.batch,
            "config": json.loads(self._config.model_dump_json()),
        }
        self.finish()
        self._try(lambda: self._manager.save(self._trainer.engine, self._trainer.optimizer, step, state))

    def finish(self) -> None:
        """Block until the last checkpoint is written."""
        self._try(self._manager.finish)
        self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call `finish`, unless an error was raised that other ranks may not have raised."""
        if error is None or isinstance(error, NonFiniteError | ReplicaError):
            self.finish()

    def _load(self, path: Path) -> int:
        optimizer = self._trainer.optimizer
        options = [{name: group[name] for name in OPTIMIZER_OPTIONS} for group in optimizer.param_groups]
        state = load(self._trainer.engine, optimizer, path)
        for group, kept in zip(optimizer.param_groups, options, strict=True):
            group.update(kept)
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise CheckpointError(
                f"the state of the checkpoint {path} has no number of steps: give one of plait train, "
                "or of save with a state of {'step': …}."
            )
        self._require_same_data(state, path)
        if self._folder.resolve() in (path.resolve(), path.resolve().parent):
            self.resumed_steps = self._manager.start_step = step
        self._progress.print(f"Resumed from {path}, after step {step}.")
        return step

    def _saved(self) -> list[Path]:
        """Return on every rank the complete checkpoints of this run found by rank 0, newest first."""

        def find() -> str:
            try:
                return json.dumps([str(path) for _, path in complete_checkpoints(self._folder)])
            except OSError:
                error = f"{self._folder} cannot be read: mend its permissions, or the disk."
                raise CheckpointError(error) from None

        found = broadcast_result(find, CheckpointError, self._mesh.group("world"), self._mesh.device)
        return [Path(path) for path in json.loads(found)]

    def _try(self, action: Callable[[], None]) -> None:
        """Call `action`; print a `CheckpointError` as a warning, unless `_warn_early` has done so."""
        try:
            action()
        except CheckpointError as error:
            if not self._warned:
                self._progress.print(f"WARNING: {error}")

    def _warn_early(self) -> None:
        """On rank 0, print once that the background save has failed; other ranks learn it when they wait."""
        if self._manager.error and not self._warned:
            self._warned = True
            self._progress.print(f"WARNING: {self._manager.error}")

    def _require_same_data(self, state: Mapping[str, Any], path: Path) -> None:
        """Raise `ConfigError` where a field that decides the training data differs from the checkpoint's."""
        now = json.loads(self._config.model_dump_json())
        for field in DATA_FIELDS:
            part, _, name = field.partition(".")
            was = section(state, "config", part).get(name)
            if was is not None and was != now[part][name]:
                raise ConfigError(
                    f"{field} is {now[part][name]!r}, and was {was!r} when {path} was written: a "
                    "resumed run needs the same data; give the same, or start over without run.resume."
                )


def shard_plan_for(manifest: Manifest, arguments: Sequence[str]) -> ShardPlan:
    """Return how a run with `arguments` of `plait train` would shard the checkpoint of `manifest`.

    Fields of the model, data and training that are not given are those of the run that wrote the checkpoint,
    if it was one of `plait train`; degrees, strategy and schedule have their defaults. Raises `PlaitError`
    for an invalid configuration or plan.
    """
    defaults = {name: section(manifest.state, "config", name) for name in ("model", "data", "train")}
    config = config_from_arguments(arguments, defaults, "the checkpoint")
    tokens = manifest.tensors.get(_TOKEN_EMBEDDING)
    vocab = config.model.vocab or (tokens.shape[0] if tokens and tokens.shape else 1)
    return build_blueprint(build_model(config.model, vocab), config.plan()).shard_plan
