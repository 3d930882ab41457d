"""`train(config)`: the whole run, as each rank lives through it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from plait.comm.mesh import Mesh
from plait.footprint.memory_report import Memory
from plait.plan import Plan
from plait.train.checkpoints import RunCheckpoints
from plait.train.compare import Comparison, compare
from plait.train.config import Config
from plait.train.data import Data, load_data
from plait.train.forecast import forecast, outcome, summary
from plait.train.introduction import introduce
from plait.train.meter import Meter
from plait.train.metrics import Metrics, open_metrics
from plait.train.model import build_model
from plait.train.order import balanced, write_order
from plait.train.progress import Follower
from plait.train.stepper import Stepper
from plait.train.stopping import Stop
from plait.train.trainer import Trainer


@dataclass(frozen=True)
class Report:
    """How a run ended; the same on every rank."""

    steps: int
    """That were done, with those before it was resumed."""
    loss: float
    """Of the last step; not a number where there was nothing left to do."""
    validation_loss: float | None
    sample: str | None
    metrics: Path
    comparison: Comparison | None
    stopped: int = 0
    """The signal that ended it; 0: it ran to its end."""
    saved: bool = True
    """False where the last checkpoint could not be written."""

    @property
    def matches(self) -> bool:
        """False where the comparison with a single rank was asked for and failed."""
        return self.comparison is None or self.comparison.matches


def train(config: Config, stop_on: Collection[int] = ()) -> Report:
    """Train as `config` says: called in every rank of a world of `config.plan().world`, or alone for one.

    Rank 0 shows the progress and writes to `run.dir`. A signal in `stop_on` that any rank gets ends the run
    after its step, with a checkpoint. Raises `ConfigError`, `DataError`, `PlanError`, `MeshError`,
    `CheckpointError` when there is nothing to resume from, `NonFiniteError` when the loss or the gradient
    norm stops being a number, and `ReplicaError` when `run.check_replicas` finds a difference. A checkpoint
    that cannot be written is told, and the run goes on.
    """
    plan, settings = config.plan(), config.train
    device = None if config.run.device == "auto" else config.run.device
    mesh = Mesh(plan, device=device, timeout=config.run.timeout, guarded=config.run.guard)
    follower = Follower(settings.steps, shown=mesh.rank == 0, bar=config.run.progress)
    with _metrics(config, mesh) as metrics, Stop(stop_on, mesh) as stop:
        data = load_data(config)
        plan = balanced(config, plan, mesh, data)
        memory = _forecast(config, plan, mesh, data)
        trainer = Trainer(config, plan, mesh, data)
        _begin(config, trainer, mesh, data, memory, follower)
        checkpoints = RunCheckpoints(config, trainer, mesh, follower)
        done = checkpoints.resume()
        write_order(trainer.engine, config.run.dir, mesh)
        metrics.begin(checkpoints.behind)
        stepper = Stepper(config, trainer, mesh, Meter(config, mesh, data.vocab), metrics, follower)
        with follower:
            follower.begin(done)
            with checkpoints:
                while done < settings.steps and not stop.number:
                    stepper.step(done)
                    done += 1
                    stop.ask()
                    checkpoints.after(done, last=done == settings.steps or bool(stop.number))
        sample = None if stop.number else trainer.sample()
        report = Report(
            steps=done,
            loss=stepper.loss,
            validation_loss=stepper.validation_loss,
            sample=sample,
            metrics=config.run.dir / "metrics.jsonl",
            comparison=None,
            stopped=stop.number,
            saved=not checkpoints.failed,
        )
        first, peak = stepper.first, stepper.peak_memory
    del trainer, stepper, checkpoints  # the comparison needs the memory
    _end(config, report, memory, peak, mesh, follower)
    if not first or report.stopped:
        return report
    comparison = compare(config, data, mesh, first)
    follower.note(str(comparison))
    return replace(report, comparison=comparison)


def _begin(
    config: Config, trainer: Trainer, mesh: Mesh, data: Data, memory: Memory | None, follower: Follower
) -> None:
    """What is told before the first step."""
    for line in introduce(config, mesh, data, trainer.parameters, has_weights=trainer.has_weights):
        follower.note(line)
    if memory is not None:
        follower.note(summary(memory))


def _end(
    config: Config, report: Report, memory: Memory | None, peak: float, mesh: Mesh, follower: Follower
) -> None:
    """What is told after the last step."""
    if report.sample is not None:
        follower.note(f"\n{report.sample}\n")
    if memory is not None and peak:
        follower.note(outcome(memory, peak, mesh.device))
    follower.note(f"Metrics are in {report.metrics}.")
    if report.stopped:
        way_on = (
            ": go on with --run.resume auto" if report.saved and config.run.save_every is not None else ""
        )
        follower.note(f"Stopped after step {report.steps}{way_on}.")


def _metrics(config: Config, mesh: Mesh) -> Metrics:
    if mesh.rank != 0:
        return Metrics()
    run = config.run
    return open_metrics(
        run.dir, config.model_dump_json(indent=2), csv_too=run.csv, tensorboard=run.tensorboard
    )


def _forecast(config: Config, plan: Plan, mesh: Mesh, data: Data) -> Memory | None:
    """What a rank will hold, where somebody wants to know."""
    if mesh.rank != 0 and config.run.memory_limit is None:
        return None
    return forecast(config, build_model(config.model, data.vocab), plan, mesh.device)
