"""The first module whose output differs between plait's layers and an independent model, both on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.huggingface.tensor_names import TensorPair
from plait.engine.local_batch import local_inputs
from plait.tensor.layer_values import Value, list_of_tensors
from plait.tensor.running_sequence import ContextParallelism, running
from plait.verification.reference.start_values import unchanged, with_values

CLOSE = 1e-6
"""Relative difference below which a module's tensors count as equal: a mistake is larger."""
_EQUAL = (
    "plait's layers on one rank give what the reference gives, so the plan makes the difference: verify it "
    "without a reference."
)


@dataclass
class ModuleCall:
    """Inputs and output of a module's first call."""

    given: Tensor | None
    output: Tensor | None


def first_differing_module(
    model: nn.Module,
    state: Mapping[str, Tensor],
    reference: Any,
    pairs: Sequence[TensorPair],
    call: Callable[[Any, Value], Any],
    inputs: Value,
) -> str:
    """Return a sentence about the first module that differs, in the order of `model`'s layers.

    `state`: the values of both. Compares modules that both have, by the names of their parameters, on the
    inputs of a whole batch.
    """
    local = with_values(model, 0, unchanged, unchanged).double().eval()
    with torch.no_grad():
        for name, parameter in local.named_parameters():
            parameter.copy_(state[name])
    device = next(iter(list_of_tensors(inputs))).device
    whole = local_inputs([inputs], ContextParallelism.of_one_rank())
    paths = {
        _module(pair.ours[0]): _module(pair.theirs)
        for pair in pairs
        if len(pair.ours) == 1 and isinstance(reference, nn.Module)
    }
    with torch.no_grad(), recorded(local.to(device), paths) as ours, running(whole.sequences[0]):
        output = local(whole.values[0])
    with torch.no_grad(), recorded(reference, paths.values()) as theirs:
        expected = call(reference, inputs)
    before: list[str] = []
    for path, one in ours.items():
        name = paths[path]
        other = theirs.get(name)
        if other is None or not _same_shape(one, other):
            continue
        if not _close(one.given, other.given):
            equal = f", where {' and '.join(before[-3:])} give the same" if before else ""
            return f"on one rank {name} is given something else{equal}: look at what is computed before it."
        if not _close(one.output, other.output):
            return f"on one rank {name} gives something else for the same input."
        before.append(name)
    if all(map(_close, list_of_tensors(output), list_of_tensors(expected))):
        return _EQUAL
    return (
        f"on one rank all modules that both have give the same: look at what follows {before[-1]}."
        if before
        else ""
    )


@contextmanager
def recorded(model: Any, paths: Any) -> Iterator[dict[str, ModuleCall]]:
    """Context: yield the calls of the modules of `model` at `paths`, in the order of their first call."""
    calls: dict[str, ModuleCall] = {}
    handles = []
    for path in dict.fromkeys(paths):

        def record(_: nn.Module, given: tuple[Any, ...], output: Any, path: str = path) -> None:
            calls.setdefault(path, ModuleCall(_tensor(given[0] if given else None), _tensor(output)))

        handles.append(model.get_submodule(path).register_forward_hook(record))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _tensor(value: Any) -> Tensor | None:
    return value.detach() if isinstance(value, Tensor) else None


def _same_shape(one: ModuleCall, other: ModuleCall) -> bool:
    mine, theirs = (one.given, one.output), (other.given, other.output)
    return all(
        a is not None and b is not None and a.shape == b.shape for a, b in zip(mine, theirs, strict=True)
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    size = float(other.double().abs().max())
    return float((one.double() - other.double()).abs().max()) <= CLOSE * size
