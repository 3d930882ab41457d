"""`MemoryCheck`: compares a rank's tensors between steps with checksums taken when they were written.

update    ──▶  record parameters, optimizer state  …  compare  ──▶  the next update
gather    ──▶  record what layers read             …  compare  ──▶  end of the backward
reduction ──▶  record gradients                    …  compare  ──▶  clipping, the update

Gradients that are scattered to shards are recorded after their own reduction, others at the end of the pass.

In each pass what was recorded is compared with the ranks that hold the same.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from plait.checkpoint.optimizer_set import whole_states
from plait.engine.corruption.recorded_checksums import ChangedTensor, NamedTensor, RecordedChecksums
from plait.engine.corruption.replica_checksums import ReplicaChecksums, UnlikeReplicas
from plait.engine.corruption.tensors_between_steps import TensorsBetweenSteps
from plait.engine.runner import Runner, Runtime
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.replica_check import check_replicas
from plait.errors import CorruptionError, ReplicaError
from plait.ranks.accelerator import is_accelerator
from plait.tensor.autograd.private_torch_functions import counts_all_writes


class _Comparison(NamedTuple):
    """A comparison whose result a GPU may not have computed yet."""

    recorded: int
    """The number of steps before which the sums were recorded, in whose update or reduction."""
    text: str
    """Between which two moments memory must not change."""
    read: Callable[[], list[ChangedTensor]]


class MemoryCheck:
    """Compares checksums of one rank's memory between steps, and with checksums of replicas."""

    def __init__(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> None:
        self._runtime, self._optimizers = runtime, optimizers
        self._held = TensorsBetweenSteps(runtime, optimizers)
        own = any(whole_states(one) is not None for one in optimizers)
        self._replicas = ReplicaChecksums(runtime.blueprint, runtime.mesh, with_state=not own)
        self._of_optimizers = {optimizer: RecordedChecksums() for optimizer in optimizers}
        self._others, self._gradients = RecordedChecksums(), RecordedChecksums()
        self._gathered: list[RecordedChecksums] = []
        """What layers read of parameters in this pass, where it is kept beside the optimizer's."""
        self._scattered: dict[int, RecordedChecksums] = {}
        """Gradients of shards, by the `id` of the buffer, as their last reduction left them."""
        self._recorded = dict.fromkeys(optimizers, 0)
        """After how many steps the state of each optimizer was recorded."""
        self._unread: list[_Comparison] = []
        self._of_replicas: tuple[int, Callable[[], list[UnlikeReplicas]]] | None = None
        self._has_warned = False
        self._began = self._steps
        """After how many steps the checks began: the state of then counts as right."""
        self.record_all()

    @property
    def _steps(self) -> int:
        """The number of steps whose forward and backward have ended."""
        return self._runtime.dropout.step

    def record_all(self) -> None:
        """Record checksums of all tensors of this rank that outlive a step, as they are now."""
        for optimizer in self._optimizers:
            self.record(optimizer)
        self._others.record(self._held.of_no_optimizer())
        self._gradients.record(self._held.gradients())

    def record(self, optimizer: Optimizer) -> None:
        """Record the parameters and the state of an optimizer, which has just updated them."""
        self._of_optimizers[optimizer].record(self._held.of_optimizer(optimizer))
        self._recorded[optimizer] = self._steps

    def compare(self, optimizer: Optimizer) -> None:
        """Compare an optimizer's tensors, and those that none updates, with their checksums before its step.

        Raises CorruptionError where they differ; on a GPU `read` does, a pass later.
        """
        first, steps = self._recorded[optimizer], self._steps
        after = f"after the update of step {first}" if first else "since the checks began"
        between = f"{after}, before that of step {max(steps, first + 1)}"
        self._start(first, between, self._of_optimizers[optimizer])
        if optimizer is self._optimizers[0]:
            self._start(first, between, self._others)
        self._compare_gradients("it was read for the update")
        self._read_finished()

    def compare_now(self) -> None:
        """Raise CorruptionError where anything has changed; waits for the device, and for no other rank."""
        self._forget_gradients()
        for optimizer in self._optimizers:
            self.compare(optimizer)
        self._read_changes()

    def compare_gradients(self, *, are_scaled: bool = False) -> None:
        """Compare this rank's gradients with their recorded sums, before they are clipped or added to.

        `are_scaled`: next they are scaled for the update, which then reads them without another comparison.
        """
        self._forget_gradients()
        self._compare_gradients("they were clipped or added to")
        self._read_finished()
        for sums in self._sums_of_gradients if are_scaled else ():
            sums.forget()

    def _forget_gradients(self) -> None:
        """Drop the recorded checksums of gradients that were set to None, as by `zero_grad`."""
        if not self._held.have_gradients:
            for sums in self._sums_of_gradients:
                sums.forget()

    @property
    def _sums_of_gradients(self) -> list[RecordedChecksums]:
        return [self._gradients, *self._scattered.values()]

    def _compare_gradients(self, before: str) -> None:
        for sums in self._sums_of_gradients:
            self._start(self._steps, f"after the reductions of step {self._steps}, before {before}", sums)

    def begin_pass(self, runner: Runner) -> None:
        """Start to compare checksums between replicas, and to record those of gathered parameters."""
        self._gathered.clear()
        runner.gatherer.observer, runner.reducer.observer = self._record_gathered, self._record_scattered
        if self._replicas.are_needed:
            gradients = [one for one in self._sums_of_gradients if one.are_recorded]
            recorded = [*self._of_optimizers.values(), self._others, *gradients]
            self._of_replicas = self._steps, self._replicas.compare(recorded)
        for sums in self._sums_of_gradients:
            sums.forget()

    def _record_gathered(self, buffer: FlatBuffer) -> None:
        """Record sums of a unit's gathered parameters, if they stay allocated until the end of the pass."""
        if not buffer.spec.whole.freed:
            sums = RecordedChecksums()
            named = (NamedTensor(name, "gathered value", one) for name, one in buffer.parameters.items())
            sums.record([one for one in named if one.tensor.numel()])
            self._gathered.append(sums)

    def _record_scattered(self, buffer: FlatBuffer) -> None:
        """Record sums of a shard's gradient after a reduce-scatter, which may be its last in this pass."""
        sums = self._scattered.setdefault(id(buffer), RecordedChecksums())
        named = (NamedTensor(name, "gradient", one) for name, one in buffer.shard_gradients.items())
        sums.record([one for one in named if one.tensor.numel()])

    def end_pass(self, runner: Runner) -> None:
        """Raise CorruptionError for wrong bits found so far, and compare what layers read in this pass."""
        self.read()
        runner.gatherer.observer = runner.reducer.observer = None
        step = self._steps + 1
        for sums in self._gathered:
            self._start(step, f"after it was gathered in step {step}, before its backward ended", sums)
        self._gathered.clear()
        self._read_finished()

    def record_gradients(self) -> None:
        """Record the gradients that a pass has left, and buffers that its forward has written.

        Sums of scattered gradients stay, where nothing was written since their reduction.
        """
        recorded: set[int] = set()
        for sums in (one for one in self._scattered.values() if one.are_recorded):
            if any(sums.are_written):  # by a division by the loss's scale, or earlier gradients were added
                sums.forget()
            else:
                recorded.update(id(one.tensor) for one in sums.tensors)
        self._gradients.record([one for one in self._held.gradients() if id(one.tensor) not in recorded])
        if any(self._others.are_written):  # as running means are, in a forward
            self._start(self._steps, f"before the end of step {self._steps + 1}", self._others)
            self._others.record(self._held.of_no_optimizer())

    def _start(self, recorded: int, text: str, sums: RecordedChecksums) -> None:
        if not (counts_all_writes() or is_accelerator(self._runtime.mesh.device)):
            if not self._has_warned:
                warnings.warn(
                    "memory is not compared while a TorchDispatchMode is on: torch does not count all writes "
                    "then, and what was written would look like wrong bits.",
                    stacklevel=2,
                )
            self._has_warned = True
            return
        self._unread.append(_Comparison(recorded, text, sums.compare()))

    def _read_finished(self) -> None:
        """Raise CorruptionError for finished comparisons on the CPU; those of a GPU are read a pass later."""
        if not is_accelerator(self._runtime.mesh.device):
            self._read_changes()

    def read(self) -> None:
        """Raise CorruptionError where a comparison that has begun found wrong bits; waits for the device."""
        self._read_changes()
        if self._of_replicas is not None:
            (steps, read), self._of_replicas = self._of_replicas, None
            different = read()
            if different:
                raise self._difference(steps, different)

    def _read_changes(self) -> None:
        unread, self._unread = self._unread, []
        for one in unread:
            changed = one.read()
            if changed:
                raise self._change(one, changed)

    def _change(self, comparison: _Comparison, changed: Sequence[ChangedTensor]) -> CorruptionError:
        first, bits = changed[0].named, "one bit" if changed[0].is_one_bit else "several bits"
        more = f", and {len(changed) - 1} more of its tensors" if len(changed) > 1 else ""
        good = max(comparison.recorded - 1, self._began)
        return CorruptionError(
            f"rank {self._runtime.mesh.rank} on host {socket.gethostname()}: {first} changed in memory by "
            f"{bits}{more}, {comparison.text}, and no operation has written to it: {_remedy(good)}; where "
            "the program writes in ways that torch does not count, as through .data or NumPy, or by a "
            "collective, let it call accept_changes() of its plait.CorruptionChecks afterwards.",
            good,
            [self._runtime.mesh.rank],
        )

    def _difference(self, steps: int, different: Sequence[UnlikeReplicas]) -> CorruptionError:
        """Return the error for sums after `steps` that differ; names the tensor if it still differs."""
        runtime, good = self._runtime, max(steps - 1, self._began)
        optimizer = self._optimizers[0] if len(self._optimizers) == 1 else None
        try:
            parameters = dict(runtime.named_parameters())
            blueprint = runtime.blueprint
            check_replicas(parameters, blueprint.layouts, blueprint.owners, runtime.mesh, optimizer)
            ranks = " and of ".join(", ".join(map(str, one.ranks)) for one in different)
            text = f"the replicas of ranks {ranks} differed, and are alike again"
        except ReplicaError as error:
            text = str(error).rpartition(": go back")[0]
        wrong = sorted({rank for one in different for rank in one.minority})
        return CorruptionError(f"after step {steps} {text}: {_remedy(good)}.", good, wrong)


def _remedy(good: int) -> str:
    """Return what to do where the state after `good` steps is known to be right."""
    known = f"a checkpoint or snapshot of step {good} or before" if good > 0 else "an earlier checkpoint"
    return f"go on from {known}, and take the device or host out of the run"
