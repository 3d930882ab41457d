"""`TrainingLoop`: one rank's engine, optimizer and rows of each batch, the loop over steps; `Callback`s."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.app.data.batches import Batches, rank_rows, row_total
from plait.app.loop.meter import Meter, StepMetrics, StepTensors
from plait.app.loop.parameter_rates import SCALE
from plait.app.loop.stream import RankStream, Stream
from plait.app.loop.stream_reader import Source
from plait.engine.engine import Engine
from plait.engine.local_batch import SequencePart
from plait.engine.resharding.reshard import reshard
from plait.errors import ConfigError, DataError, NonFiniteError, listed, terminal_text
from plait.plan.argument_checks import require_instance, require_number
from plait.plan.plan import Plan
from plait.ranks.accelerator import is_accelerator
from plait.tensor.microbatches import Microbatches, counted_microbatches
from plait.tensor.nested_values import Value, tensors_of


def require_batches(batches: object) -> None:
    """Raise `DataError` unless `batches` has the attributes of a source of batches: `size` and `batch`."""
    if not (hasattr(batches, "size") and hasattr(batches, "batch")):
        has_state = isinstance(batches, Source)
        remedy = "plait.Stream of it" if has_state else "plait.Loader of the dataset"
        raise DataError(
            f"batches are an object of {type(batches).__name__}, without size and batch(step, rows): give a "
            f"{remedy}."
        )


def repeated_rows(batches: Batches) -> str:
    """Return a warning where a batch has more rows than the data, or ""."""
    rows = row_total(batches)
    if not rows or batches.size <= rows:
        return ""
    return (
        f"WARNING: a batch has {batches.size} rows, and rows come again after {rows}: some are in a batch "
        "more than once."
    )


def uneven_epochs(batches: Batches, steps: int) -> str:
    """Return a note, as text, if the last epoch is cut so that some rows are used once more; else ""."""
    rows, size = row_total(batches), batches.size
    epochs, more = divmod(steps * size, rows) if rows else (0, 0)
    if not rows or not epochs or not more:
        return ""
    return (
        f"Data: {steps} steps of {size} rows are {steps * size / rows:.3g} epochs of {rows} rows: {more} of "
        f"them are taken {epochs + 1} times, the others {epochs}."
    )


def token_count(targets: Value, rows: int) -> int:
    """Return the tokens of a global batch: `rows` times the length of `targets`; `rows` if they have none."""
    first = next(iter(tensors_of(targets)), None)
    return rows if first is None or first.dim() < 2 else rows * first.shape[1]


class Callback:
    """Base class of callbacks: each method does nothing. All ranks call them, in the order of the list."""

    @property
    def key(self) -> str:
        """The name of the callback's state in checkpoints: by default the name of its class."""
        return type(self).__name__

    def resume(self, run: TrainingLoop) -> None:
        """Called before the `begin` of all callbacks: load earlier state and set `run.done`."""

    def begin(self, run: TrainingLoop) -> None:
        """Called before the first step of this run; `run.done` steps were finished before."""

    def is_due(self, step: int) -> bool:
        """Return whether `measured` needs the state of the model right after `step`, counted from 1.

        On a GPU the numbers of other steps are read after the next step was submitted.
        """
        return False

    def before_step(self, run: TrainingLoop) -> None:
        """Called before the step `run.done`, counted from 0."""

    def submitted(self, run: TrainingLoop) -> None:
        """Called right after a step was submitted to the device, before its numbers are read."""

    def measured(self, run: TrainingLoop, row: dict[str, float]) -> None:
        """Called with the numbers of step `row["step"]`, counted from 1; entries added to it are logged."""

    def after_step(self, run: TrainingLoop) -> None:
        """Called after each step; `run.done` steps are finished."""

    def replanned(self, run: TrainingLoop) -> None:
        """Called between two steps when `run.engine` was replaced, or its schedule's actions were reordered.

        Also before `begin`, where a callback before it resumes a run with another plan.
        """

    def end(self, run: TrainingLoop, error: BaseException | None) -> None:
        """Called after the last step, or after an `error` that other ranks may not have raised."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return state for checkpoints as JSON values, the same on every rank; empty for none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of the checkpoint from which a run resumes; called before `begin`."""


class TrainingLoop:
    """Trains an engine's model on one rank; every rank makes one with the same arguments.

    On a GPU the numbers of a step are read after the next one has been submitted, so that the host does not
    wait for the device; at once where a callback `is_due`.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        batches: Batches | Stream,
        *,
        steps: int,
        learning_rate: Callable[[int], float] | None = None,
        clip: float = math.inf,
        flops_per_token: float | None = None,
        advice: str = "lower the learning rate or raise its warm-up",
    ) -> None:
        """`advice`: how to mend a loss that is not finite; other arguments as for `plait.fit`.

        Raises `DataError` where data-parallel ranks cannot share a batch, `ConfigError` where a learning rate
        would replace different ones of parameter groups.
        """
        _require_rates_apart(optimizer, learning_rate)
        self.engine, self.optimizer, self.mesh = engine, optimizer, engine.mesh
        self.batches: Batches = batches.on(self.mesh) if isinstance(batches, Stream) else batches
        self.steps, self.max_norm, self.advice = steps, clip, advice
        self.done = 0
        """Number of finished steps."""
        self.resumed_steps = 0
        """Steps of this run before it was resumed; 0 if it started from another run's checkpoint."""
        self.row: dict[str, float] = {"loss": math.nan, "peak_memory_bytes": 0.0}
        """The numbers of the latest step that were read."""
        self.numbers: StepMetrics | None = None
        """The same, with those of each rank."""
        self.stopped = 0
        """Not 0 where the run ends before its last step: the signal that a rank had received, or -1."""
        self.requested_stop: Callable[[], int] = int
        """Returns the signal to stop that this rank has received; 0: none."""
        self.tell: Callable[[str], None] = _print if self.mesh.rank == 0 else lambda line: None
        """Prints a line for the user, on rank 0."""
        self.callbacks: Sequence[Callback] = ()
        """The callbacks of `run`, in their order."""
        self.notes = ""
        """Text of the user about the run, for its report."""
        self._rate = learning_rate
        self._meter = Meter(self.mesh, engine.plan.precision, flops_per_token, engine.plan.linears)
        require_batches(self.batches)
        replicas, size = self.mesh.size("dp"), self.batches.size
        self._rows = rank_rows(self.mesh.index("dp"), replicas, size)
        self.rows_of_replicas: tuple[int, ...] = (size // replicas,) * replicas
        """How many rows of each batch a replica of the model takes, by index along `dp`: see `share_rows`."""
        self.gives_uncut_rows = True
        """Whether the latest batch came as whole rows: not in micro-batches, nor as a part of sequences."""
        self._tokens, self._data_seconds = 0, 0.0
        self._unread: tuple[int, Callable[[], StepMetrics]] | None = None

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """Train until `steps` are done, or until a callback or a signal stops the run on all ranks.

        Raises `NonFiniteError` on every rank where a loss or a gradient norm is not finite.
        """
        require_instance("callbacks", callbacks, Sequence, "give a list of callbacks")
        for callback in callbacks:
            remedy = "give objects of subclasses of plait.loop.Callback"
            require_instance("a callback", callback, Callback, remedy)
        self.callbacks = callbacks
        for callback in callbacks:
            callback.resume(self)
        with ExitStack() as stack:
            for callback in callbacks:
                stack.push(partial(_end, callback, self))
                callback.begin(self)
            if line := repeated_rows(self.batches):
                self.tell(line)
            if self.engine.forces_routing:
                self.tell(
                    "Routing is forced to be balanced (forced_routing), for timings: the model learns with "
                    "other experts than its routers choose."
                )
            if self.done >= self.steps:
                self.tell(
                    f"{self.done} steps were done before, and the run has {self.steps}: none is left to take."
                )
            self._end_with_data()
            while self.done < self.steps and not self.stopped:
                self.run_step()

    def run_step(self) -> None:
        """Run step number `done`, with its measurements and callbacks."""
        step = self.done
        self._call("before_step")
        self._meter.start()
        loss, norm = self.step(step)
        rate = self.learning_rate(step)
        numbers = self._meter.measure(
            step,
            StepTensors(
                loss, norm, self.engine.loss_weight(), self.engine.non_finite(), self.engine.expert_load
            ),
            rate,
            tokens=self._tokens,
            data_seconds=self._data_seconds,
            signal=self.requested_stop(),
        )
        self._call("submitted")
        self.finish()
        self._unread = step, numbers
        self.done = step + 1
        at_once = not is_accelerator(self.mesh.device) or self.is_last
        if at_once or any(callback.is_due(self.done) for callback in self.callbacks):
            self.finish()
        self._call("after_step")

    def finish(self) -> None:
        """Read the last step's numbers, if unread; raise if not finite, else call callbacks' `measured`."""
        if self._unread is None:
            return
        (step, read), self._unread = self._unread, None
        numbers = read()
        self.stopped = self.stopped or numbers.signal
        self._refuse_non_finite(step, numbers)
        self.row, self.numbers = numbers.row, numbers
        self._call("measured", self.row)

    def stop(self) -> None:
        """End the run after this step; to be called on all ranks."""
        self.stopped = self.stopped or -1

    def share_rows(self, rows: Sequence[int]) -> None:
        """Set how many rows of each later batch each replica of the model takes, by its index along `dp`.

        The rows of a replica are consecutive. All ranks call it, with the same numbers. A step computes the
        same, up to rounding: each row counts as before. Rows that do not divide into the plan's micro-batches
        are cut into micro-batches of unlike sizes. Raises `DataError` for a `Stream`, and for numbers that do
        not share a batch.
        """
        if not self.may_share_rows(rows):
            raise DataError(
                f"rows {listed([*map(str, rows)])} do not share a batch of {self.batches.size} among "
                f"{self.mesh.size('dp')} replicas: give each at least one for each of its "
                f"{self.engine.plan.microbatches} micro-batches."
            )
        if isinstance(self.batches, RankStream) and len(set(rows)) > 1:
            raise DataError(
                "a stream gives each replica as many rows as the others: share rows out of batches "
                "that are read by their numbers, such as those of a plait.Loader."
            )
        index = self.mesh.index("dp")
        self.rows_of_replicas = tuple(rows)
        self._rows = slice(sum(rows[:index]), sum(rows[: index + 1]))

    def may_share_rows(self, rows: Sequence[int]) -> bool:
        """Return whether `rows` has a count per replica, at least `microbatches`, that sum to a batch."""
        enough = min(rows, default=0) >= self.engine.plan.microbatches
        return enough and len(rows) == self.mesh.size("dp") and sum(rows) == self.batches.size

    def reshard(self, plan: Plan) -> None:
        """Replace engine and optimizer by those of another plan on the same ranks, with `plait.reshard`.

        Raises `PlanError` on every rank, before anything changes, where the plan does not fit.
        """
        self.finish()
        self.engine.compare_memory()  # that of the new engine counts as right
        self.optimizer.zero_grad()
        engine, self.optimizer = reshard(self.engine, self.optimizer, plan, self.mesh)
        assert engine is not None, "this rank is in the mesh"
        self.engine = engine
        self.replanned()

    def replanned(self) -> None:
        """Call `replanned` of each callback, after the engine was replaced or its actions reordered."""
        self._call("replanned")

    def named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Yield the callbacks by their keys; a second one with the same key as `KEY 2`."""
        seen = Counter[str]()
        for callback in self.callbacks:
            name = callback.key
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}", callback

    @property
    def sets_rate(self) -> bool:
        """Whether the run sets the learning rate of each step; else it is the optimizer's."""
        return self._rate is not None

    @property
    def is_last(self) -> bool:
        """Whether the current step is the last one."""
        return self.done >= self.steps or bool(self.stopped)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Train on the batch of `step`, counted from 0; return its loss and gradient norm, 0-d.

        The loss is the mean over the global batch, the norm is that before clipping. Both are
        the same on every rank, and returned without waiting for the device.
        Communication: the engine's (activations over `pp`, attention over `cp`, regions and the loss over
        `tp`, gradients over `dp_cp`, the norm over `model`).
        """
        loss = self.forward_backward(step)
        return loss, self.engine.step(self.optimizer, self.max_norm)

    def forward_backward(self, step: int) -> Tensor:
        """Set the learning rate of `step`, compute its batch's gradients anew, and return the loss."""
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(step) * group.get(SCALE, 1.0)
        began = time.perf_counter()
        inputs, targets = self.batches.batch(step, self._rows)
        self._data_seconds = time.perf_counter() - began
        self._end_with_data(step + 1)
        self._tokens = token_count(targets, self.batches.size)
        self.optimizer.zero_grad()
        self.gives_uncut_rows = not isinstance(inputs, Microbatches | SequencePart)
        if len(set(self.rows_of_replicas)) > 1 and self.gives_uncut_rows:
            inputs, targets, _ = counted_microbatches(inputs, targets, self.engine.plan.microbatches, None)
        return self.engine.forward_backward(inputs, targets)

    def _end_with_data(self, steps: int | None = None) -> None:
        """Reduce `steps` to the number for which a stream that ends still has batches."""
        last = self.done if steps is None else steps
        if not isinstance(self.batches, RankStream) or self.batches.left is None or last >= self.steps:
            return
        self.steps = last
        left = f", of which the last {self.batches.left} fill no batch" if self.batches.left else ""
        self.tell(f"The run ends after step {last}: the stream has no more samples{left}.")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0; without a schedule that of the first group."""
        return float(self.optimizer.param_groups[0]["lr"]) if self._rate is None else self._rate(step)

    def _call(self, method: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(self, *arguments)

    def _refuse_non_finite(self, step: int, numbers: StepMetrics) -> None:
        """Raise where the loss or norm of a step is not finite, with rank and stage, or no target counts."""
        world = self.mesh.size("world")
        if 0 < len(numbers.norm_ranks) < world:
            raise NonFiniteError(_of_some_replicas(step, numbers, world))
        loss, norm = numbers.row["loss"], numbers.row["grad_norm"]
        # A norm that overflows a loss scale which can be lowered is no error, but of some replicas only.
        overflows = self.engine.adapts_loss_scale and self.engine.loss_scale >= 1
        if math.isfinite(loss) and (math.isfinite(norm) or overflows):
            return
        if numbers.row["trained_tokens"] == 0:
            raise DataError(
                f"step {step + 1}: none of the batch's targets counts, all are -100: give larger batches, or "
                "leave out samples without a target, such as conversations that are cut before their answer."
            )
        mesh, schedule = self.mesh, self.engine.schedule
        if not math.isfinite(loss):
            stages, what, value = [schedule.stages - 1], "loss", loss
            rank = numbers.loss_rank % world
        else:
            rank = numbers.gradient_rank % world
            stages = list(schedule.stages_of(mesh.coordinate_of(rank)["pp"]))
            what, value = "gradient norm", norm
        where = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        raise NonFiniteError(
            f"step {step + 1}: the {what} is {value} on rank {rank}, {where}: "
            f"{self.advice}, or look at the data of that step."
        )


def _of_some_replicas(step: int, numbers: StepMetrics, world: int) -> str:
    """Return the error text where the gradient norm is finite on some replicas of the model only."""
    bad = numbers.norm_ranks
    rank = numbers.gradient_rank if numbers.gradient_rank in bad else bad[0]
    sound = next(other for other in range(world) if other not in bad)
    return (
        f"step {step + 1}: the gradient norm is not finite on rank {rank}, and is on rank {sound}, whose "
        "replica of the model should have the same gradients: go back to a checkpoint, and look for what "
        "only some ranks did, such as a write to gradients, or a faulty device."
    )


def _require_rates_apart(
    optimizer: torch.optim.Optimizer, learning_rate: Callable[[int], float] | None
) -> None:
    """Raise `ConfigError` where the rates of parameter groups would be replaced, or their scales not used."""
    groups = optimizer.param_groups
    rates = sorted({float(group["lr"]) for group in groups if "lr" in group})
    if learning_rate is not None and len(rates) > 1:
        raise ConfigError(
            f"the optimizer's groups have learning rates from {rates[0]:g} to {rates[-1]:g}, which "
            f"learning_rate would replace: leave it out, or give the groups one rate, and a factor of it as "
            f"{SCALE}."
        )
    for group in groups:
        require_number(f"{SCALE} of a parameter group", group.get(SCALE, 1.0))
    if learning_rate is None and any(group.get(SCALE, 1.0) != 1.0 for group in groups):
        raise ConfigError(
            f"parameter groups have {SCALE}, a factor of learning_rate, which is not given: give "
            "learning_rate, a number or a schedule."
        )


def _print(line: str) -> None:
    """Print a line, which may quote files, on rank 0: the default `tell`."""
    print(terminal_text(line))


def _end(
    callback: Callback, run: TrainingLoop, kind: object, error: BaseException | None, trace: object
) -> None:
    """Call `callback.end` with the error, if any: an exit callback of an `ExitStack`."""
    callback.end(run, error)
