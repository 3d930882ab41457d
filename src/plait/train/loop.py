"""`train(config)`: the whole run, as each rank lives through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.comm.mesh import Mesh
from plait.engine import Recording
from plait.errors import ReplicaError
from plait.footprint.report import Memory
from plait.plan import Plan
from plait.train.compare import Comparison, LossAndNorm, compare
from plait.train.config import Config
from plait.train.data import Data, load_data
from plait.train.forecast import forecast, outcome, summary
from plait.train.introduction import introduce
from plait.train.meter import Meter
from plait.train.metrics import Metrics, open_metrics
from plait.train.model import build_model
from plait.train.order import balanced, reordered, write_order
from plait.train.progress import Follower
from plait.train.trace import recorded, write_trace
from plait.train.trainer import Trainer


@dataclass(frozen=True)
class Report:
    """How a run ended; the same on every rank."""

    steps: int
    loss: float
    validation_loss: float | None
    sample: str | None
    metrics: Path
    comparison: Comparison | None

    @property
    def matches(self) -> bool:
        """False where the comparison with a single rank was asked for and failed."""
        return self.comparison is None or self.comparison.matches


def train(config: Config) -> Report:
    """Train as `config` says: called in every rank of a world of `config.plan().world`, or alone for one.

    Rank 0 shows the progress and writes to `run.dir`. Raises `ConfigError`, `DataError`, `PlanError`,
    `MeshError`, `NonFiniteError` when the loss or the gradient norm stops being a number, and `ReplicaError`
    when `run.check_replicas` finds a difference.
    """
    plan, settings = config.plan(), config.train
    device = None if config.run.device == "auto" else config.run.device
    mesh = Mesh(plan, device=device, timeout=config.run.timeout, guarded=config.run.guard)
    follower = Follower(settings.steps, shown=mesh.rank == 0, bar=config.run.progress)
    with _metrics(config, mesh) as metrics:
        data = load_data(config)
        plan = balanced(config, plan, mesh, data)
        memory = _forecast(config, plan, mesh, data)
        trainer = Trainer(config, plan, mesh, data)
        _begin(config, trainer, mesh, data, memory, follower)
        meter = Meter(config, mesh, data.vocab)
        first: list[LossAndNorm] = []
        validation_loss = None
        with follower:
            for step in range(settings.steps):
                meter.start()
                looked_at = step + 1 in (config.run.trace, config.parallel.reorder)
                with recorded(trainer.engine, wanted=looked_at) as recording:
                    loss, norm = trainer.step(step)
                row = meter.row(step, loss, norm, trainer.rate(step))
                trainer.refuse_non_finite(step, row["loss"], row["grad_norm"])
                _check_replicas(config, trainer, step)
                follower.update(step + 1, row["loss"], row["tokens_per_second"])
                if recording is not None:
                    for line in _looked_at(config, trainer, recording, step + 1, mesh):
                        follower.note(line)
                if _validates(config, step):
                    validation_loss = trainer.validate(step)
                    if validation_loss is not None:
                        row["validation_loss"] = validation_loss
                        follower.note(f"step {step + 1}: validation loss {validation_loss:.3f}")
                metrics.write(row)
                if step < config.run.compare:
                    first.append((row["loss"], row["grad_norm"]))
        sample = trainer.sample()
    del trainer  # the comparison needs the memory
    if sample is not None:
        follower.note(f"\n{sample}\n")
    if memory is not None:
        follower.note(outcome(memory, row["peak_memory_bytes"], mesh.device))
    follower.note(f"Metrics are in {config.run.dir / 'metrics.jsonl'}.")
    comparison = compare(config, data, mesh, first) if first else None
    if comparison is not None:
        follower.note(str(comparison))
    return Report(
        steps=settings.steps,
        loss=row["loss"],
        validation_loss=validation_loss,
        sample=sample,
        metrics=config.run.dir / "metrics.jsonl",
        comparison=comparison,
    )


def _begin(
    config: Config, trainer: Trainer, mesh: Mesh, data: Data, memory: Memory | None, follower: Follower
) -> None:
    """What is told, and kept, before the first step."""
    write_order(trainer.engine, config.run.dir, mesh)
    for line in introduce(config, mesh, data, trainer.parameters):
        follower.note(line)
    if memory is not None:
        follower.note(summary(memory))


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


def _looked_at(
    config: Config, trainer: Trainer, recording: Recording, step: int, mesh: Mesh
) -> Iterator[str]:
    """What a step that was recorded is good for."""
    if step == config.run.trace:
        yield write_trace(recording, step, config.run.dir, mesh)
    if step == config.parallel.reorder:
        yield reordered(trainer.engine, recording, step, config.run.dir, mesh)


def _check_replicas(config: Config, trainer: Trainer, step: int) -> None:
    every = config.run.check_replicas
    if every == 0 or (step + 1) % every:
        return
    try:
        trainer.engine.check_replicas(trainer.optimizer)
    except ReplicaError as error:
        raise ReplicaError(f"step {step + 1}: {error}") from None


def _validates(config: Config, step: int) -> bool:
    every = config.train.validate_every
    return step + 1 == config.train.steps or (every > 0 and (step + 1) % every == 0)
