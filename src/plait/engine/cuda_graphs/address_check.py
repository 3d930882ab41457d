"""Checks that the tensors that graphs use besides their own memory (such as parameters) have not moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from plait.engine.pipeline.stage import Stage
from plait.engine.sharding.unit import Unit
from plait.errors import PlanError
from plait.plan.rules import join


class FixedAddresses:
    """Compares addresses of parameters, gradients and buffers with those at the first recording."""

    def __init__(self, units: Mapping[str, Unit], stages: Mapping[int, Stage]) -> None:
        named, owned = dict(_tensors_of_units(units)), dict(_owners_of_buffers(stages))
        self._names = [*named, *owned]
        self._tensors, self._owners = list(named.values()), list(owned.values())
        self._known: list[int] = []

    def note(self) -> None:
        """Note the addresses, when the first graph is recorded; later calls do nothing."""
        self._known = self._known or self._addresses()

    def check(self) -> None:
        """Raise PlanError where a tensor is not where it was when the first graph was recorded."""
        if not self._known or (now := self._addresses()) == self._known:
            return
        pairs = zip(self._names, self._known, now, strict=True)
        name, before, after = next((name, *both) for name, *both in pairs if both[0] != both[1])
        raise PlanError(
            f"{name} has moved from address {before:#x} to {after:#x} since graphs with it were recorded: "
            "write to it in place, with copy_(), or leave plan.cuda_graphs out."
        )

    def _addresses(self) -> list[int]:
        buffers = [getattr(module, name) for module, name in self._owners]
        return list(map(Tensor.data_ptr, self._tensors + buffers))


def _tensors_of_units(units: Mapping[str, Unit]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of layers and the flat gradients, with names for errors."""
    for unit in units.values():
        for number, stage in enumerate(unit.stages):
            for name, parameter in unit.parameters_of(stage).items():
                yield f"the parameter {name} of stage {stage}", parameter
            for buffer in unit.trainable:
                gradient = buffer.whole_gradients[number]
                yield f"the gradient of {buffer.spec.names[0]} of stage {stage}", gradient


def _owners_of_buffers(stages: Mapping[int, Stage]) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield the module and the attribute of each buffer, with names for errors."""
    for number, stage in stages.items():
        for layer in stage.layers:
            for path, module in layer.module.named_modules():
                for name, _ in module.named_buffers(recurse=False):
                    full = join(join(layer.path, path), name)
                    yield f"the buffer {full} of stage {number}", (module, name)
