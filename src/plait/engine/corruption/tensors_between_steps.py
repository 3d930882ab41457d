"""Lists the tensors that a rank keeps between steps: parameters, buffers, optimizer state, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_

from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.optimizer_set import whole_states
from plait.engine.corruption.recorded_checksums import STATE, NamedTensor
from plait.engine.runner import Runtime
from plait.plan.rules import join


class TensorsBetweenSteps:
    """Lists the tensors of one rank's engine and optimizers that outlive a step."""

    def __init__(self, runtime: Runtime, optimizers: Sequence[Optimizer]) -> None:
        self._runtime = runtime
        self._parameters = dict(runtime.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._moving = {
            id(parameter)
            for unit in runtime.units.values()
            for buffer in unit.buffers
            if buffer.spec.device_copy is not None
            for parameter in buffer.shard_parameters.values()
        }
        trained = {id(one) for optimizer in optimizers for one in _parameters_of(optimizer)}
        self._known: dict[Optimizer, tuple[Sequence[object], Sequence[NamedTensor]]] = {}
        """Of each optimizer, its parameters and what is in their state, and the tensors of both."""
        self._others = [one for one in runtime.named_parameters() if id(one[1]) not in trained]

    def of_optimizer(self, optimizer: Optimizer) -> Sequence[NamedTensor]:
        """Return an optimizer's parameters of this rank, their state, and whole parameters that it owns.

        The same list as before while its state has the same tensors.
        """
        values: list[object] = []
        for parameter in _parameters_of(optimizer):
            values.append(parameter)
            values.extend(optimizer.state.get(parameter, {}).values())
        before, found = self._known.get(optimizer, ((), ()))
        if len(values) != len(before) or not all(map(is_, values, before)):
            found = [one for one in self._of_optimizer(optimizer) if one.tensor.numel()]
            is_nested = any(isinstance(one, Mapping | list | tuple) for one in values)
            self._known[optimizer] = ([] if is_nested else values), found
        return found

    def _of_optimizer(self, optimizer: Optimizer) -> Iterator[NamedTensor]:
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

    def of_no_optimizer(self) -> Sequence[NamedTensor]:
        """Return the parameters that no optimizer updates, and all buffers of this rank's layers."""
        parameters = [NamedTensor(name, "value", one, id(one) in self._moving) for name, one in self._others]
        buffers = [
            NamedTensor(join(layer.path, name), f"buffer in stage {stage.number}", buffer)
            for stage in self._runtime.pipeline.stages.values()
            for layer in stage.layers
            for name, buffer in layer.module.named_buffers()
        ]
        return [one for one in (*parameters, *buffers) if one.tensor.numel()]

    @property
    def have_gradients(self) -> bool:
        """Whether any parameter of this rank has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters.values())

    def gradients(self) -> Sequence[NamedTensor]:
        """Return the gradients that optimizers are to read."""
        held = ((name, parameter.grad) for name, parameter in self._parameters.items())
        return [NamedTensor(name, "gradient", one) for name, one in held if one is not None and one.numel()]


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
