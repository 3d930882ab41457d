"""What a rank holds from one step to the next: parameters, buffers, optimizer state, reduced gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.optimizer_set import whole_states
from plait.engine.corruption.recorded_sums import STATE, NamedTensor
from plait.engine.runner import Runtime
from plait.plan.rules import join


class HeldTensors:
    """The tensors of one rank's engine and optimizers."""

    def __init__(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> None:
        self._runtime = runtime
        self._names = {id(parameter): name for name, parameter in runtime.named_parameters()}
        self._moving = {
            id(parameter)
            for unit in runtime.units.values()
            for buffer in unit.buffers
            if buffer.spec.device_copy is not None
            for parameter in buffer.shard_parameters.values()
        }
        trained = {id(one) for optimizer in optimizers for one in _parameters_of(optimizer)}
        self._others = [one for one in runtime.named_parameters() if id(one[1]) not in trained]

    def of_optimizer(self, optimizer: Optimizer) -> Iterator[NamedTensor]:
        """Yield an optimizer's parameters of this rank, their state, and whole parameters that it owns."""
        wholes = whole_states(optimizer)
        for parameter in _parameters_of(optimizer):
            name = self._names.get(id(parameter))
            if name is None:
                continue
            yield NamedTensor(name, "value", parameter, id(parameter) in self._moving)
            if wholes is not None and parameter in wholes.whole_parameters:
                yield NamedTensor(name, "owner's copy", wholes.whole_parameters[parameter])
            for key, tensor in _tensors_in(STATE, optimizer.state.get(parameter, {})):
                yield NamedTensor(name, key, tensor)

    def of_no_optimizer(self) -> Iterator[NamedTensor]:
        """Yield the parameters that no optimizer updates, and all buffers of this rank's layers."""
        for name, parameter in self._others:
            yield NamedTensor(name, "value", parameter, id(parameter) in self._moving)
        for stage in self._runtime.pipeline.stages.values():
            for layer in stage.layers:
                for name, buffer in layer.module.named_buffers():
                    yield NamedTensor(join(layer.path, name), f"buffer in stage {stage.number}", buffer)

    def gradients(self) -> Iterator[NamedTensor]:
        """Yield the gradients that optimizers are to read."""
        for name, parameter in self._runtime.named_parameters():
            if parameter.grad is not None:
                yield NamedTensor(name, "gradient", parameter.grad)


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in optimizer state, which may be nested, with the keys that lead to them."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors_in(f"{name} {key}", one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _tensors_in(f"{name} {place}", one)
