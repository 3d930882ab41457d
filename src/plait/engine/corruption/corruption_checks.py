"""`CorruptionChecks`: finds wrong bits in a run's memory, and in the results that its ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from plait.engine.corruption.layer_recheck import LayerRecheck
from plait.engine.corruption.memory_check import MemoryCheck
from plait.engine.engine import Engine
from plait.engine.runner import Runner
from plait.errors import PlanError
from plait.plan.argument_checks import require_flag, require_instance, require_number
from plait.ranks.run_kept_in_memory import keeps_runs


class CorruptionChecks:
    """Finds bits that flip in memory between steps, and layers that a rank computes wrongly.

    Raises CorruptionError on the rank. All ranks make one, with the same arguments, as a context manager or
    to be closed.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        memory: bool = True,
        recheck_rate: float = 0.0,
    ) -> None:
        """Begin to check the steps of an engine and its optimizer, or optimizers.

        `memory`: after each update add up all bytes of parameters, optimizer state and buffers, after each
        reduction those of gradients, and compare the sums before the next update reads them; and compare what
        several ranks hold. `recheck_rate`: the share, from 0 to 1, of the runs of layers that the next rank
        along `dp` computes again, forward and backward, drawn at random; all bits must be the same.

        On a GPU the host does not wait for sums: what they show is raised at the end of the next
        `forward_backward`, before its update. Memory: 8 bytes a tensor, small ones whole; of a run that is
        computed again its inputs, outputs, their gradients and the layers' gradients, twice. Communication:
        in each `forward_backward` 8 bytes for each kind of replica and rank over `world`; for each run that
        is computed again what it read and wrote, over `dp`. Raises PlanError where the plan has CUDA graphs,
        for `recheck_rate` without `dp` or with routers, and for arguments of other types.
        """
        optimizers = _checked(engine, optimizer, memory, recheck_rate)
        self._engine = engine
        self._memory = MemoryCheck(engine.runtime, optimizers) if memory else None
        self._kept_memory: MemoryCheck | None = None
        """What still compares the memory of a run that this process keeps after an error."""
        self._layers = LayerRecheck(engine.runtime, recheck_rate) if recheck_rate else None
        self._hooks: list[RemovableHandle] = []
        for one in optimizers if memory else ():
            self._hooks.append(one.register_step_pre_hook(self._before_update))
            self._hooks.append(one.register_step_post_hook(self._after_update))
        engine.watches.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare memory a last time, and close the checks; after an error, check no more steps.

        Where this process keeps the run for `plait.reshard_kept`, that compares the memory before it moves.
        """
        if error is None:
            self.compare()
        if error is None or not keeps_runs():
            self.close()
        else:
            self._remove_hooks()
            self._kept_memory, self._memory, self._layers = self._memory, None, None

    @property
    def rechecked(self) -> int:
        """The number of layer runs of another rank that this rank has computed again."""
        return 0 if self._layers is None else self._layers.rechecked

    def accept_changes(self) -> None:
        """Record memory's present contents as right, after writes that torch does not count.

        These are writes by `.data`, NumPy or an own kernel, by collectives of `torch.distributed`, by
        `torch.amp.GradScaler`, and by optimizers with `fused=True` that the checks were not given. Other
        operations of PyTorch are known without it, but for those on lists of tensors on the CPU (such as
        `clip_grad_norm_` with `foreach=True`) within a `TorchDispatchMode`, which are in a part of the step.
        """
        if self._memory is not None:
            self._memory.record_all()

    def compare(self) -> None:
        """Raise CorruptionError where memory has changed since the last update. On a GPU the host waits."""
        memory = self._memory or self._kept_memory
        if memory is not None:
            memory.compare_now()

    def close(self) -> None:
        """Remove the checks' hooks, and stop comparing."""
        self._remove_hooks()
        self._memory = self._kept_memory = self._layers = None
        if self in self._engine.watches:
            self._engine.watches.remove(self)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_pass(self, runner: Runner) -> None:
        """Check gradients, and draw layer runs to check; the engine calls it as `forward_backward` begins."""
        self._kept_memory = None  # the engine goes on without these checks
        if self._memory is not None:
            self._memory.compare_gradients()
            self._memory.begin_pass(runner)
        if self._layers is not None:
            self._layers.begin_pass()

    def end_pass(self, runner: Runner) -> None:
        """Raise CorruptionError for wrong bits in this pass; the engine calls it when gradients are final."""
        if self._memory is not None:
            self._memory.end_pass(runner)
        if self._layers is not None:
            self._layers.end_pass(runner.gatherer, self.compare)
        if self._memory is not None:
            self._memory.record_gradients()

    def before_clipping(self) -> None:
        """Compare gradients with their checksums; the engine calls it before it scales them."""
        if self._memory is not None:
            self._memory.compare_gradients(are_scaled=True)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._memory is not None:
            self._memory.compare(optimizer)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._memory is not None:
            self._memory.record(optimizer)


def _checked(
    engine: object, optimizer: Optimizer | Sequence[Optimizer], memory: object, rate: float
) -> list[Optimizer]:
    """Return the optimizers as a list. Raises PlanError for arguments that cannot be used."""
    require_instance("the engine", engine, Engine, "give what plait.parallelize returned", PlanError)
    assert isinstance(engine, Engine)
    require_flag("memory", memory, PlanError)
    require_number("recheck_rate", rate, PlanError)
    if float(rate) > 1:
        raise PlanError(f"recheck_rate is {rate}: give a share, from 0 to 1.")
    optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
    for one in optimizers:
        require_instance("the optimizer", one, Optimizer, "give one of torch.optim, or a list", PlanError)
    if engine.plan.cuda_graphs and (memory or rate):
        raise PlanError(
            "plan.cuda_graphs is True, and a graph's replay calls no check: leave plan.cuda_graphs out, or "
            "plait.CorruptionChecks."
        )
    if rate and engine.plan.dp == 1:
        raise PlanError(
            f"recheck_rate is {rate}, but with plan.dp = 1 no other rank has the same layers: set plan.dp to "
            "2 or more, or leave recheck_rate out."
        )
    if rate and engine.runtime.balance is not None:
        raise PlanError(
            f"recheck_rate is {rate}, but the model has routers, whose choices depend on all tokens of a "
            "step: leave recheck_rate out."
        )
    return optimizers
