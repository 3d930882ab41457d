"""`train(config)`: the training run, on every rank, and the signals on which it ends between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from plait.app.config.config import Config
from plait.app.loop.builtin_callbacks import EarlyStop, Log, Progress, ReplicaChecks, WrongBits
from plait.app.loop.describe_run import describe, plan_line
from plait.app.loop.report_callback import Report
from plait.app.loop.run_folder import LOCK, locked_folder
from plait.app.loop.straggler_callback import Stragglers
from plait.app.loop.validation import Validation
from plait.app.train.one_rank_comparison import Comparison, LossAndNorm, compare_steps
from plait.app.train.plan_for_fewer_ranks import config_of_world
from plait.app.train.predicted_run import (
    division_memory,
    peak_line,
    predict_memory,
    predicted_step,
    prediction_line,
    step_lines,
)
from plait.app.train.run_callbacks import (
    FIELD,
    WRITTEN,
    FirstStepsRecord,
    Recordings,
    RunFolder,
    Samples,
    loggers_of,
)
from plait.app.train.run_checkpoints import FOLDER, run_checkpoints
from plait.app.train.run_data import Data, load_data, with_steps_of_epochs
from plait.app.train.trainer import Trainer, model_to_train, plan_with_measured_cut
from plait.estimate.memory.memory_report import Memory
from plait.estimate.prediction.prediction import Prediction
from plait.optimizers.hidden_matrices import listed_matrices
from plait.optimizers.muon import Muon
from plait.pictures.report.page import REPORT_FILE
from plait.ranks.exchange_with_supervisor import note_stop, noted_stop
from plait.ranks.failure.process_watch import GracefulStop
from plait.ranks.mesh import Mesh


@contextmanager
def received_signal(signals: Collection[int]) -> Iterator[Callable[[], int]]:
    """Context: yield a function that returns which of `signals` this rank has received, or 0.

    The first signal is recorded, so that the run stops between two steps; the second ends the process. One
    that a rank has received before a supervisor restarted the ranks counts.
    """
    received = noted_stop()

    def receive(number: int) -> None:
        nonlocal received
        received = number
        note_stop(number)

    with GracefulStop(signals, receive):
        # Local ranks start with these signals blocked, until there is a handler.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            yield lambda: received
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run, the same on every rank."""

    steps: int
    """Number of finished steps, including steps before the run was resumed."""
    loss: float
    """Loss of the last step; NaN where a resumed run had no steps left."""
    validation_loss: float | None
    """That of the first validation."""
    sample: str | None
    metrics: Path
    validation_losses: Mapping[str, float | None]
    """Latest loss of each validation, by name; that of a single one without a name is called ""."""
    stopped: int
    """The signal that ended the run; 0: none."""
    saved: bool
    """False where the last checkpoint could not be written."""
    reported: bool
    """False where rank 0 could not write the report."""
    comparison: Comparison | None = None

    @property
    def matches(self) -> bool:
        """Whether `run.compare` found the same results as on a single rank; True without a comparison."""
        return self.comparison is None or self.comparison.matches


def train(config: Config, stop_on: Collection[int] = ()) -> TrainingResult:
    """Train as configured by `config`; called by every rank of a world of `config.plan().world` ranks.

    Rank 0 shows the progress and writes to `run.dir`. A signal in `stop_on` on any rank ends the run
    after its step, with a checkpoint. Raises `ConfigError`, `DataError`, `PlanError`, `MeshError`,
    `CheckpointError` when there is nothing to resume from, `NonFiniteError` when the loss or the gradient
    norm is not finite, `ReplicaError` when `run.check_replicas` finds a difference, and `CorruptionError`
    when `run.check_memory` or `run.recheck_rate` finds wrong bits. A checkpoint that cannot be written is a
    warning, and the run goes on.
    """
    config = config_of_world(config)
    plan, run = config.plan(), config.run
    device = None if run.device == "auto" else run.device
    mesh = Mesh(plan, device=device, timeout=run.timeout, guarded=run.guard)
    lock = locked_folder(run.dir, LOCK, mesh, field=FIELD, written=WRITTEN)
    with lock, received_signal(stop_on) as received:
        data = load_data(config)
        config = with_steps_of_epochs(config, data)
        progress = Progress(shown=mesh.rank == 0, bar=run.progress)
        plan = plan_with_measured_cut(config, plan, mesh, data)
        memory = None
        if mesh.rank == 0 or run.memory_limit is not None:  # which all ranks have to keep
            memory = predict_memory(config, model_to_train(config, data.vocab), plan, mesh.device)
        predicted = predicted_step(config, plan, mesh.device) if mesh.rank == 0 else None  # which prints it
        trainer = Trainer(config, plan, mesh, data)
        report = Report(run.dir, step=run.trace, page=run.report, metrics=False, field=FIELD, locks=False)
        trainer.tell, trainer.requested_stop = report.tell_through(progress.print), received
        _introduce(config, trainer, data, memory, predicted, report)
        result, first = _trained(config, trainer, data, report, progress)
        peak = trainer.row["peak_memory_bytes"]
    del trainer  # the comparison needs the memory
    _print_end(config, result, memory, predicted, peak, mesh, progress)
    if not first or result.stopped:
        return result
    comparison = compare_steps(config, data, mesh, first)
    progress.print(str(comparison))
    return replace(result, comparison=comparison)


def _trained(
    config: Config, trainer: Trainer, data: Data, report: Report, progress: Progress
) -> tuple[TrainingResult, list[LossAndNorm]]:
    """Train with the callbacks of `config`; return the result, and the numbers of the first steps."""
    settings, run = config.train, config.run
    first, checkpoints = FirstStepsRecord(run.compare), run_checkpoints(config)
    loggers = loggers_of(run.dir, csv_too=run.csv, tensorboard=run.tensorboard)
    log, samples = Log(*loggers, folder=run.dir, field=FIELD), Samples(config)
    validations = [
        Validation(one.batches, every=settings.validate_every, count=one.count, name=one.name)
        for one in data.validations
    ]
    callbacks = [
        RunFolder(config),
        Recordings(config),
        *([_stragglers(config, trainer, data)] if run.stragglers else []),
        ReplicaChecks(run.check_replicas),
        WrongBits(memory=run.check_memory, recheck_rate=run.recheck_rate),
        progress,
        first,
        *validations,
        *([EarlyStop(settings.patience, watch=settings.watch)] if settings.patience else []),
        report,
        log,
        checkpoints,
        samples,
    ]
    trainer.run(callbacks)
    signal = max(0, trainer.stopped)
    result = TrainingResult(
        steps=trainer.done,
        loss=trainer.row["loss"],
        validation_loss=validations[0].loss if validations else None,
        validation_losses={one.name: one.loss for one in validations},
        sample=None if signal else samples.last(trainer),
        metrics=run.dir / "metrics.jsonl",
        stopped=signal,
        saved=not checkpoints.failed,
        reported=report.has_page,
    )
    return result, first.numbers


def _stragglers(config: Config, trainer: Trainer, data: Data) -> Stragglers:
    """Return the callback that names slow ranks and, with `run.rebalance`, moves work away from them."""
    run, device = config.run, trainer.mesh.device
    memory = division_memory(config, trainer.engine.plan, data.vocab, device) if run.rebalance else None
    return Stragglers(every=run.stragglers, rebalance=run.rebalance, memory=memory)


def _introduce(
    config: Config,
    trainer: Trainer,
    data: Data,
    memory: Memory | None,
    predicted: Prediction | None,
    report: Report,
) -> None:
    """Print the lines before the first step, and on rank 0 set the description in `run.json`."""
    mesh = trainer.mesh
    lines = [*banner(config, mesh, data, *trainer.sizes, has_weights=trainer.has_weights)]
    if trainer.engine.plan.linears is not None:
        lines.append(trainer.engine.blueprint.float8.line(trainer.engine.plan.linears))
    if isinstance(trainer.optimizer, Muon):
        lines += listed_matrices(trainer.optimizer.matrices)
    lines += [] if memory is None else [prediction_line(memory)]
    if mesh.rank == 0:
        about = describe(
            trainer.engine,
            config.run.dir.resolve().name,
            lines,
            rows=config.train.batch,
            memory=memory,
            seconds=None if predicted is None else predicted.step_seconds,
            changed_fields=[*_changed_fields(config)],
            notes=config.run.notes,
        )
        report.describe(about)
    for line in lines:
        trainer.tell(line)


def _changed_fields(config: Config) -> Iterator[str]:
    """Yield the names of the fields that differ from their default."""
    for (section, values), (_, defaults) in zip(config, Config(), strict=True):
        for (name, value), (_, default) in zip(values, defaults, strict=True):
            if value != default:
                yield f"{section}.{name}"


def banner(
    config: Config, mesh: Mesh, data: Data, parameters: int, trained: int, *, has_weights: bool = False
) -> Iterator[str]:
    """Yield the lines that are printed before the first step: model, plan, data and folder.

    `parameters` and `trained`: of the whole model, and how many of them are not frozen. `has_weights`:
    whether the folder of a Hugging Face model holds weights to start from.
    """
    model, settings, plan = config.model, config.train, config.plan()
    count = f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"
    frozen = "" if trained == parameters else f", of which {trained:,} are trained"
    yield (
        f"Model: {model.name}, {count} parameters{frozen} ({model.layers} blocks, hidden {model.hidden}, "
        f"context {model.context}, vocabulary {data.vocab:,})."
    )
    if model.folder is not None and has_weights:
        yield f"Weights: those in {model.folder}."
    elif model.folder is not None:
        yield (
            f"WARNING: {model.folder} holds no weights: the run starts from random values (train.seed = "
            f"{settings.seed})."
        )
    yield plan_line(plan, mesh, settings.batch)
    epochs = " and ".join(f"{each:.3g} epochs{of}" for of, each in data.epochs(settings.steps).items())
    yield f"Data: {data.summary}." + (f" {settings.steps} steps are {epochs}." if epochs else "")
    for one in data.validations:
        if one.summary:
            yield f"Validation{f' {one.name}' * bool(one.name)}: {one.summary}."
    if settings.warmup > settings.steps:
        highest = settings.lr * settings.steps / settings.warmup
        yield (
            f"WARNING: the learning rate rises to {highest:g} of {settings.lr:g}, as train.warmup = "
            f"{settings.warmup} is more than train.steps = {settings.steps}."
        )
    yield f"Run: {config.run.dir}"


def _print_end(
    config: Config,
    result: TrainingResult,
    memory: Memory | None,
    predicted: Prediction | None,
    peak: float,
    mesh: Mesh,
    progress: Progress,
) -> None:
    """Print after the last step: the sample, memory and time, the metrics' path, how to resume if stopped."""
    if result.sample is not None:
        progress.print(f"\n{result.sample}\n")
    if memory is not None and peak:
        progress.print(peak_line(memory, peak, mesh.device))
    for line in step_lines(config.run.dir, predicted) if predicted is not None and mesh.rank == 0 else ():
        progress.print(line)
    has_report = config.run.report and result.reported
    report = f"; the report is {config.run.dir / REPORT_FILE}" if has_report else ""
    progress.print(f"Metrics are in {result.metrics}{report}.")
    has_checkpoint = result.saved and config.run.save_every is not None
    if result.stopped:
        how_to_resume = ": go on with --run.resume auto" if has_checkpoint else ""
        progress.print(f"Stopped after step {result.steps}{how_to_resume}.")
    elif has_checkpoint:
        saved = config.run.dir / FOLDER
        export = "" if config.model.experts else "; `plait checkpoint export` writes them for transformers"
        progress.print(f"Checkpoints are in {saved}{export}.")
