"""Refuses layers whose result depends on earlier runs, such as running means; found on the meta device.

    a parameter                                      refused: the optimizer has its own memory of it
    a buffer that is saved, from the inputs          refused: ranks and micro-batches have other inputs
    any other tensor, from the inputs                refused where it reaches the output of a later run
    a buffer, from buffers and parameters only       a cache; or a count of runs, a power iteration: that is
    an attribute that is a number                    returned, and a stage sets it back between the
                                                     micro-batches of a step, so that it changes once a step

Not found is what a forward does to certain shapes or in later steps only, what functions that autograd runs
in the backward write, and what a layer does that fails when its operations are followed, such as one with a
higher-order operator of torch.

Each memory has a set of sources, as bits: those of all that was written to it. An operation adds the sources
of its arguments to its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ModelError, PlaitError
from plait.models.layers.layer_sequence import attribute_tensors, own_numbers
from plait.plan.rules import join
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of

INPUT = 1
"""The source that stands for a layer's inputs, and for random numbers."""
FROM_SHAPES = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
"""Operations whose result depends on the shape of their argument only."""


class MemorySources:
    """Tracks from which source tensors each storage was computed, as a bit mask per storage."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}  # by the `id` of a storage
        self._kept: dict[int, torch.UntypedStorage] = {}  # so that no other storage gets that `id`
        self.written: set[int] = set()

    def of(self, tensor: Tensor) -> int:
        """Return the sources from which a tensor's memory was computed, as a bit mask."""
        return self._bits.get(id(_memory(tensor)), 0)

    def add(self, tensors: Iterable[Tensor], bits: int) -> None:
        """Add the sources `bits` (a bit mask) to those of the memory of tensors."""
        for tensor in tensors:
            self._set(tensor, self.of(tensor) | bits)

    def write(self, tensor: Tensor, bits: int, *, whole: bool) -> None:
        """Record a write to a tensor from the sources `bits`; `whole`: nothing of its content remains."""
        self._set(tensor, bits if whole else self.of(tensor) | bits)
        self.written.add(id(_memory(tensor)))

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether an operation has written to a tensor's memory."""
        return id(_memory(tensor)) in self.written

    def _set(self, tensor: Tensor, bits: int) -> None:
        memory = _memory(tensor)
        self._bits[id(memory)], self._kept[id(memory)] = bits, memory


def _memory(tensor: Tensor) -> Any:
    """Return the storage of a tensor; the tensor itself where it has none, as a sparse one."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else tensor


class FollowSources(TorchDispatchMode):
    """Dispatch mode that propagates, through each operation, from which sources tensors were computed."""

    def __init__(self, sources: MemorySources, random: int = INPUT) -> None:
        """`random`: the sources of random numbers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources, self._random = sources, random

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`; its results, and what it writes, have the sources of its arguments."""
        sources, kwargs = self._sources, kwargs or {}
        written = list(_written(func, args, kwargs))
        overwritten = [tensor for tensor, whole in written if whole]
        given = [one for one in tensors_of([args, kwargs]) if all(one is not other for other in overwritten)]
        bits = self._random if torch.Tag.nondeterministic_seeded in func.tags else 0
        if func.overloadpacket.__name__ not in FROM_SHAPES:
            for tensor in given:
                bits |= sources.of(tensor)
        result = func(*args, **kwargs)
        for tensor, whole in written:
            sources.write(tensor, bits, whole=whole)
        sources.add(tensors_of(result), bits)
        return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an operation writes to, each with whether all of its content is replaced.

    `_schema` is private: torch has no public way to what an operation writes.
    """
    name: str = func.overloadpacket.__name__
    arguments = {
        one.name: (args[number] if number < len(args) else kwargs.get(one.name), one)
        for number, one in enumerate(func._schema.arguments)
    }
    norm_trains = "batch_norm" in name and "backward" not in name and arguments.get("training", (False,))[0]
    for local, (given, argument) in arguments.items():
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # Older batch norms write to their statistics, and their schema does not say so.
        if is_written or (norm_trains and local in ("running_mean", "running_var")):
            for tensor in tensors_of(given):
                overwrites = name in ("copy_", "fill_", "zero_") or argument.kwarg_only
                yield tensor, overwrites and tensor.nbytes == tensor.untyped_storage().nbytes()


def refuse_carried_values(layer: NamedLayer, value: Value, length: int) -> tuple[str, ...]:
    """Return the names of buffers and numbers that count runs of `layer`; raise ModelError for other state.

    `layer` is in training, and is changed: give a copy. Raises ModelError where it writes to a parameter,
    sets a saved buffer from its inputs, gives an output that depends on the inputs of the run before,
    trains a tensor that is no parameter, or calls `backward` in its forward.
    """
    module, sources = layer.module, MemorySources()
    before = _Held.of(module)
    sources.add(tensors_of(value), INPUT)
    for number, tensor in enumerate(before.buffers.values(), 1):
        sources.add([tensor], INPUT << number)
    try:
        output = _run(layer, value, length, sources)
    except PlaitError:
        raise
    except Exception:  # it has run before, when its operations were not followed
        torch.compiler.reset()  # which else does not try again to compile what it could not in this run
        return ()
    _refuse_written_parameters(layer, before, sources)
    _refuse_other_leaves(layer, value, output)
    _refuse_own_backward(layer)
    after, saved = _Held.of(module), module.state_dict().keys()
    for name, tensor in after.buffers.items():
        if name in saved and sources.of(tensor) & INPUT:
            raise ModelError(
                f"{join(layer.path, name)}, a buffer of {_owner(module, name)}, is set from the layer's "
                "inputs (or random numbers) in training: its value would depend on the rank and on how the "
                "batch is cut, so call eval() on that module, or compute it outside of the model, from all "
                "rows."
            )
    changed = {name for name, number in after.numbers.items() if before.numbers.get(name) != number}
    kept = (*after.buffers.values(), *after.attributes)
    left = [tensor for tensor in kept if sources.of(tensor) & INPUT]
    if left or changed:
        _refuse_memory_of_inputs(layer, value, length, left)
    numbers = [name for name, number in _Held.of(module).numbers.items() if number != after.numbers.get(name)]
    return (*_counting(before, after, sources), *(name for name in numbers if name in changed))


@dataclass(frozen=True)
class _Held:
    """The tensors and numbers that a module holds at some time, by name, and the memory of its parameters."""

    parameters: dict[str, Tensor]
    memory: dict[str, torch.UntypedStorage]
    buffers: dict[str, Tensor]
    attributes: list[Tensor]
    """Those that are neither, also in lists and dictionaries."""
    numbers: dict[str, int | float]

    @staticmethod
    def of(module: nn.Module) -> _Held:
        """Return the parameters, buffers, other tensors and numbers that `module` holds now."""
        parameters: dict[str, Tensor] = dict(module.named_parameters())
        attributes = [tensor for _, tensor in attribute_tensors(module)]
        memory = {name: one.untyped_storage() for name, one in parameters.items()}
        numbers = {
            join(path, name): number
            for path, one in module.named_modules()
            for name, number in own_numbers(one).items()
        }
        return _Held(parameters, memory, dict(module.named_buffers()), attributes, numbers)


def _run(layer: NamedLayer, value: Value, length: int, sources: MemorySources, random: int = INPUT) -> Value:
    """Return the output of the layer for clones of `value`, and follow its operations."""
    with torch.device("meta"), torch.enable_grad(), FollowSources(sources, random):
        return layer.run(map_tensors(torch.clone, value), length)[0]


def _refuse_written_parameters(layer: NamedLayer, before: _Held, sources: MemorySources) -> None:
    now = dict(layer.module.named_parameters())
    for name, parameter in before.parameters.items():
        memory = before.memory[name]
        same = now.get(name) is parameter and parameter.untyped_storage() is memory
        if not same or sources.is_written(parameter):
            raise ModelError(
                f"{join(layer.path, name)} is a parameter that {_owner(layer.module, name)} writes to in its "
                "forward, where it may be a copy of what the optimizer updates: compute with a changed "
                "value, or change the parameter after optimizer.step()."
            )


def _refuse_other_leaves(layer: NamedLayer, value: Value, output: Value) -> None:
    """Raise ModelError where the output has a gradient for a tensor that is neither input nor parameter."""
    leaf = other_leaf(tensors_of(output), (*layer.module.parameters(), *tensors_of(value)))
    if leaf is not None:
        raise ModelError(
            f"{_described(layer)} computes with a tensor {list(leaf.shape)} that requires a gradient but "
            "is none of its parameters: make it a parameter of the layer, or detach it."
        )


def other_leaf(
    outputs: Iterable[Tensor], known: Iterable[Tensor], given: Iterable[Node] = ()
) -> Tensor | None:
    """Return a leaf tensor that a backward of `outputs` would reach and that is not in `known`, or None.

    `given`: nodes beyond which the graph is not followed.
    """
    ids, seen = set(map(id, known)), set(given)
    waiting = [one.grad_fn for one in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in ids:
            return leaf
        for other, _ in node.next_functions:
            waiting.append(other)
    return None


def _refuse_own_backward(layer: NamedLayer) -> None:
    for name, parameter in layer.module.named_parameters():
        if parameter.grad is not None:
            raise ModelError(
                f"{_described(layer)} calls backward() in its forward, which gives {name} a gradient where "
                "its memory may not be allocated: return what the loss needs, or use torch.autograd.grad."
            )


def _refuse_memory_of_inputs(layer: NamedLayer, value: Value, length: int, left: Sequence[Tensor]) -> None:
    """Raise ModelError if a second run's output depends on the first run's inputs."""
    again = MemorySources()
    again.add(left, INPUT)
    output = _run(layer, map_tensors(torch.empty_like, value), length, again, random=0)
    if any(again.of(tensor) & INPUT for tensor in tensors_of(output)):
        raise ModelError(
            f"{_described(layer)} keeps a tensor of one micro-batch and computes with it in the next: its "
            "output would depend on the rank and on how the batch is cut, so return what a later layer "
            "needs, and keep nothing."
        )


def _counting(before: _Held, after: _Held, sources: MemorySources) -> tuple[str, ...]:
    """Return the written buffers that depend on earlier values of written buffers, as counters do."""
    numbers = {name: INPUT << number for number, name in enumerate(before.buffers, 1)}
    written = [
        name
        for name, tensor in after.buffers.items()
        if tensor is not before.buffers.get(name) or sources.is_written(tensor)
    ]
    bits = sum(numbers.get(name, 0) for name in written)
    return tuple(name for name in written if sources.of(after.buffers[name]) & bits)


def _described(layer: NamedLayer) -> str:
    return f"layer {layer.path!r} ({type(layer.module).__name__})"


def _owner(module: nn.Module, name: str) -> str:
    """Return the class of the module in `module` that holds the tensor `name`."""
    return type(module.get_submodule(name.rpartition(".")[0])).__name__
