"""Finds modules of a layer that read the same tensor, on the meta device, and joins linears among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plait.tensor.autograd.joined_linears import JoinedLinears, are_side_by_side
from plait.tensor.autograd.regathered_activations import version_of
from plait.tensor.autograd.weight_gradient_queue import WeightGradientQueue
from plait.tensor.find_module_hooks import call_hooks, has_own_forward
from plait.tensor.parallel.apply_float8 import CASTS

JOINABLE = "is_product_of_input"
"""Attribute of a module, other than an `nn.Linear`, whose forward is `linear(input, weight, bias, queue)`."""


@dataclass(frozen=True)
class Readers:
    """Linears of a layer that read the same input tensor, by their names in the layer."""

    names: tuple[str, ...]
    """In the order of their calls."""
    copied: frozenset[str] = frozenset()
    """Those whose output a backward reads, while it reads that of another one not: as a part of one tensor it
    would keep all of it."""


class ReaderRecord:
    """Records which linears of a layer are called once, and with which tensor.

    Not where a call is apart from others: under `torch.no_grad()`, with `saved_tensors_hooks` (as inside
    `torch.utils.checkpoint`, which counts what each operation saves), or with a backward within the forward.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Tensor, int]] = []
        """Name, input and version of the input; holds the inputs, so that their ids stay apart."""
        self._apart: set[str] = set()
        self._probe = torch.ones((), device="meta", requires_grad=True)
        self._probe_was_saved = False

    def note(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of `module`: record the call and its input."""
        if len(inputs) == 1 and isinstance(inputs[0], Tensor):
            self._calls.append((name, inputs[0], version_of(inputs[0])))
        if not torch.is_grad_enabled() or self._saves_elsewhere():
            self._apart.add(name)

    def note_output(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        """Forward hook of `module`: note if the layer itself runs a backward through `output`."""
        if output.requires_grad:
            output.register_hook(lambda _: self._apart.add(name))  # type: ignore[no-untyped-call]

    def save(self, tensor: Tensor) -> Tensor:
        """Saved-tensor hook: return `tensor`; record whether it is the probe, a tensor saved as a test."""
        self._probe_was_saved |= tensor is self._probe
        return tensor

    def _saves_elsewhere(self) -> bool:
        self._probe_was_saved = False
        _ = self._probe * self._probe
        return not self._probe_was_saved

    @property
    def readers(self) -> tuple[Readers, ...]:
        """The linears that read the same tensor, for each such tensor."""
        names = [name for name, _, _ in self._calls]
        by_tensor: dict[tuple[int, int], list[str]] = {}
        for name, tensor, version in self._calls:
            if names.count(name) == 1 and name not in self._apart:
                by_tensor.setdefault((id(tensor), version), []).append(name)
        return tuple(Readers(tuple(each)) for each in by_tensor.values() if len(each) > 1)


@contextmanager
def recording_readers(layer: nn.Module) -> Iterator[ReaderRecord]:
    """Context that records which linears in `layer` are called with the same tensor."""
    record = ReaderRecord()
    handles = [
        handle
        for name, module in layer.named_modules()
        if type(module) is nn.Linear or getattr(module, JOINABLE, False)
        for handle in (
            module.register_forward_pre_hook(partial(record.note, name)),
            module.register_forward_hook(partial(record.note_output, name)),
        )
    ]
    try:
        with saved_tensors_hooks(record.save, lambda tensor: tensor):
            yield record
    finally:
        for handle in handles:
            handle.remove()


class PartialOutputs:
    """Runs a layer as if linears with the same input were one matrix product, to check that it can be so."""

    def __init__(self, layer: nn.Module, readers: Iterable[Readers]) -> None:
        self._layer, self._readers = layer, tuple(readers)
        self._outputs: dict[str, Tensor] = {}
        self._saved: list[Tensor] = []

    @contextmanager
    def giving_parts(self) -> Iterator[None]:
        """Context that imitates joined linears: outputs are views of a larger tensor."""
        handles = [
            self._layer.get_submodule(name).register_forward_hook(partial(self._give_part, name))
            for each in self._readers
            for name in each.names
        ]
        try:
            hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
            with hooks, _AttentionInputs(self._saved):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def readers(self) -> tuple[Readers, ...]:
        """Linears of one input that can run as one product, and outputs that must be copied for autograd."""
        saved = {id(one.untyped_storage()) for one in self._saved}
        found = []
        for each in self._readers:
            read = {name for name in each.names if id(self._outputs[name].untyped_storage()) in saved}
            found.append(replace(each, copied=frozenset(read if len(read) < len(each.names) else ())))
        return tuple(found)

    def _give_part(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        width = output.shape[-1]
        both: tuple[Tensor, ...] = torch.unsafe_split_with_sizes(
            torch.cat([output, output], -1), [width, width], -1
        )
        self._outputs[name] = both[0].detach()
        return both[0]

    def _save(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor.detach())
        return tensor


class _AttentionInputs(TorchFunctionMode):
    """Function mode that records the inputs of attention: meta kernels do not save them for backward.

    Raises NotImplementedError where strides are given by the layer, who knows those of whole outputs only.
    """

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; record its inputs if it is attention, and raise for `as_strided`."""
        if func in (torch.as_strided, Tensor.as_strided):
            raise NotImplementedError("strides of a tensor of its own, which a part of another has not")
        if func is functional.scaled_dot_product_attention:
            given = (*args, *(kwargs or {}).values())
            self._found += (one.detach() for one in given if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


def join_linears(
    layer: nn.Module, readers: Iterable[Readers], queue: WeightGradientQueue
) -> list[JoinedLinears]:
    """Join linears of a layer that read the same input, where their parameters follow each other in memory.

    Only linears whose weight gradients are deferred to `queue` are joined: not those with hooks, frozen or
    alone in their dtype.
    """
    joined: list[JoinedLinears] = []
    for each in readers:
        named = {name: layer.get_submodule(name) for name in each.names}
        linears: list[Any] = [one for one in named.values() if _is_joinable(one)]
        in_memory = sorted(linears, key=lambda one: int(one.weight.storage_offset()))
        while in_memory:
            run = [in_memory.pop(0)]
            while in_memory and _fit([*run, in_memory[0]]):
                run.append(in_memory.pop(0))
            if len(run) > 1:
                first = min(run, key=linears.index)
                of_copied = [named[name] for name in each.copied]
                copied = [number for number, one in enumerate(run) if one in of_copied]
                joined.append(JoinedLinears(run, run.index(first), copied, queue))
    return joined


def _is_joinable(module: Any) -> bool:
    """Return whether a module multiplies its input by a weight that trains, and nothing else happens."""
    deferred = type(module) is nn.Linear and has_own_forward(module) and not hasattr(module, CASTS)
    if not deferred and not getattr(module, JOINABLE, False):
        return False
    trains = all(parameter.requires_grad for parameter in module.parameters())
    return trains and next(call_hooks(module), None) is None


def _fit(linears: Sequence[Any]) -> bool:
    """Return whether the weights, and all biases or none, follow each other in memory."""
    biases = [one.bias for one in linears if one.bias is not None]
    if len(biases) not in (0, len(linears)) or len({id(one.weight) for one in linears}) < len(linears):
        return False
    weights = [one.weight for one in linears]
    return are_side_by_side(weights) and (not biases or are_side_by_side(biases))
