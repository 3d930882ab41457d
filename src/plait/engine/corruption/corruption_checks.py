"""`CorruptionChecks`: whether the memory of a run, and what its ranks compute, have wrong bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from plait.engine.corruption.memory_check import MemoryCheck
from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.plan.argument_checks import require_flag, require_instance


class CorruptionChecks:
    """Finds bits that have flipped in memory between steps; raises CorruptionError. All ranks make one."""

    def __init__(
        self, engine: Engine, optimizer: Optimizer | Sequence[Optimizer], *, memory: bool = True
    ) -> None:
        """Begin to check the steps of an engine and its optimizer, or optimizers, until `close`.

        `memory`: record the sum of all bytes of parameters, optimizer state and buffers after each update,
        and of gradients after their reduction, and compare it before they are read for the next update. What
        several ranks hold is compared between them after each step. Memory: 8 bytes a tensor. Communication:
        8 bytes for each kind of replica and rank over `world`, in each `forward_backward`. On a GPU the host
        does not wait: what a step finds is raised at the end of the next `forward_backward`, before the
        update. Raises PlanError where the plan has CUDA graphs, and for arguments of other types.
        """
        require_instance("the engine", engine, Engine, "give what plait.parallelize returned", PlanError)
        require_flag("memory", memory, PlanError)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for one in optimizers:
            require_instance("the optimizer", one, Optimizer, "give one of torch.optim, or a list", PlanError)
        if engine.plan.cuda_graphs:
            raise PlanError(
                "plan.cuda_graphs is True, and a graph's replay calls no check: leave plan.cuda_graphs out, "
                "or plait.CorruptionChecks."
            )
        self._engine = engine
        self._memory = MemoryCheck(engine.runtime, optimizers) if memory else None
        self._hooks: list[RemovableHandle] = []
        if memory:
            for one in optimizers:
                self._hooks += [
                    one.register_step_pre_hook(self._before_update),
                    one.register_step_post_hook(self._after_update),
                ]
        engine.watches.append(self)

    def accept_changes(self) -> None:
        """Take what memory holds now as right, after the program has written to it through `.data` or NumPy.

        Writes by operations of PyTorch are known without it. On all ranks alike.
        """
        if self._memory is not None:
            self._memory.record_all()

    def read(self) -> None:
        """Raise CorruptionError for what was found so far; on a GPU the host waits. All ranks call it."""
        if self._memory is not None:
            self._memory.read()

    def close(self) -> None:
        """End the checks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._memory = [], None
        if self in self._engine.watches:
            self._engine.watches.remove(self)

    def begin_pass(self) -> None:
        """Called by the engine when `forward_backward` begins."""
        if self._memory is not None:
            self._memory.compare_gradients()
            self._memory.begin_pass()

    def end_pass(self) -> None:
        """Called by the engine when the gradients of `forward_backward` are final."""
        if self._memory is not None:
            self._memory.end_pass()

    def before_clipping(self) -> None:
        """Called by the engine before it scales the gradients."""
        if self._memory is not None:
            self._memory.compare_gradients()

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._memory is not None:
            self._memory.compare(optimizer)

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._memory is not None:
            self._memory.record(optimizer)
