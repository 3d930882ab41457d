"""Records an optimizer's step as a graph, if tensors hold everything that changes from step to step.

`capturable` optimizers count their steps in tensors; the learning rate must be one, too. Whatever else the
step depends on, the numbers of its groups and where tensors lie, must be as in the step that was recorded:
else it runs eagerly, and is recorded again when it has not changed for a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from plait.engine.cuda_graphs.graph_recorder import GraphRecorder, RecordedWork
from plait.engine.cuda_graphs.host_reads import HostReads
from plait.engine.cuda_graphs.replay_check import ReplayCheck

RECORDED, REPLAYED = "the optimizer's step was recorded", "the optimizer's step was replayed"
CHANGED = "the optimizer: its first steps, or others than the one before"


class OptimizerGraph:
    """Graph of an optimizer's step: recorded once two steps have the same settings, then replayed."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder, self._pool = recorder, recorder.new_pool()
        self._recorded: RecordedWork | None = None
        self._settings: Hashable = None
        """Those of the step before, or of the recorded one."""
        self._reads = ""
        """Why no step can be recorded."""

    def step(self, optimizer: torch.optim.Optimizer, check: ReplayCheck | None = None) -> str:
        """Do a step; return `RECORDED`, `REPLAYED`, or why it ran eagerly. `check` compares the two."""
        reason = self._reads or why_never(optimizer)
        if reason:
            optimizer.step()
            return reason
        settings = settings_of(optimizer)
        if settings != self._settings:
            with HostReads() as reads:
                optimizer.step()
            if reads.reads:
                self._reads = f"the optimizer: the host reads the result of {reads.reads[0]}"
            self._recorded, self._settings = None, settings_of(optimizer)
            return self._reads or CHANGED
        if self._recorded is None:
            self._recorded = self._recorder.record(lambda: optimizer.step() and None, self._pool)
            return RECORDED
        if check is None:
            self._recorded.replay()
        else:
            check.compare_update(dict(_named_tensors(optimizer)), self._recorded.replay, optimizer.step)
        return REPLAYED


def why_never(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer's steps cannot be recorded; empty if they can."""
    if not all(group.get("capturable", False) for group in optimizer.param_groups):
        return f"the optimizer: {type(optimizer).__name__} is not capturable"
    if not all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return "the optimizer: its learning rate is no tensor"
    return ""


def settings_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """Return everything that a recorded step depends on besides the values of its tensors."""
    numbers = tuple(
        (name, value.data_ptr() if isinstance(value, Tensor) else repr(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    )
    gradients = tuple(
        None if one.grad is None else one.grad.data_ptr()
        for group in optimizer.param_groups
        for one in group["params"]
    )
    return numbers, gradients, tuple(one.data_ptr() for _, one in _named_tensors(optimizer))


def _named_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and the tensors of their state."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = f"parameter {place} of group {number}"
            yield name, parameter
            state: dict[Any, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value
