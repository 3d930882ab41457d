"""The addresses of what graphs read and write besides their own memory: parameters, buffers and gradients."""

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
        self._tensors = dict(_tensors_of_units(units))
        self._buffers = dict(_owners_of_buffers(stages))
        self._known: dict[str, int] = {}

    def note(self) -> None:
        """Note the addresses, when the first graph is recorded; later calls do nothing."""
        self._known = self._known or dict(self._addresses())

    def check(self) -> None:
        """Raise PlanError where a tensor is not where it was when the first graph was recorded."""
        for name, address in self._addresses() if self._known else ():
            if address != self._known[name]:
                raise PlanError(
                    f"{name} has moved from address {self._known[name]:#x} to {address:#x} since graphs that "
                    "use it were recorded: write to it in place, with copy_(), or leave plan.cuda_graphs out."
                )

    def _addresses(self) -> Iterator[tuple[str, int]]:
        for name, tensor in self._tensors.items():
            yield name, tensor.data_ptr()
        for name, (module, attribute) in self._buffers.items():
            yield name, getattr(module, attribute).data_ptr()


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
