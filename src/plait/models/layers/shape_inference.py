"""Shape inference: shapes and dtypes at each boundary between layers, and whether a gradient is sent back.

Found by running the layers once on the meta device: no memory, no arithmetic and no message. Every rank
does it for the whole model, so sender and receiver agree without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, PlaitError
from plait.models.layers.joinable_linears import PartialOutputs, Readers, recording_readers
from plait.models.layers.layer_sequence import attribute_tensors
from plait.tensor.find_module_hooks import call_hooks
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, leaf_of, map_leaves, map_tensors, tensors_of


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and `requires_grad` of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorInfo:
        """Return the shape, dtype and `requires_grad` of `tensor`."""
        return TensorInfo(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """The memory of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerInfo:
    """Result of a layer's shape inference: shapes and dtypes of its output, whether it writes to its input.

    `output` is the layer's output with a `TensorInfo` in place of each tensor.
    """

    writes_input: bool
    output: Value
    length: int = 0
    """Of the sequence that the layer is given a part of, if it is."""
    returns_parameter: bool = False
    """Whether a tensor of the output is on the memory of one of the layer's parameters."""
    output_is_kept: bool = False
    """Whether the output may be read outside of plait: a hook gets it, or the layer sets it as attribute."""
    counting: tuple[str, ...] = ()
    """The buffers and numbers, by name in the layer, that each run in training changes, for any input."""
    readers: tuple[Readers, ...] = ()
    """The linears that read the same tensor, for each such tensor, if they may give parts of a larger one."""
    regions_in_float8: tuple[bool, ...] = ()
    """For each tensor-parallel region that it enters, in order, whether the input is gathered in float8."""

    @cached_property
    def tensors(self) -> list[TensorInfo]:
        """The `TensorInfo`s of the output, in the order in which its tensors are sent."""
        infos: list[TensorInfo] = []
        self.rebuild(infos.append)
        return infos

    def check(self, output: Value, path: str) -> None:
        """Raise ModelError unless the output of the layer at `path` has the inferred shapes and dtypes."""
        info = self.output
        is_one = isinstance(info, TensorInfo) and isinstance(output, Tensor)
        if is_one and output.shape == info.shape and output.dtype is info.dtype:
            return  # the common case, kept cheap
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(output)]
        expected = [(info.shape, info.dtype) for info in self.tensors]
        if given != expected:
            raise ModelError(
                f"layer {path!r} gave {_listed(given)}, but {_listed(expected)} on the meta device: "
                "its output's shapes and dtypes must not depend on values, the device or torch.autocast."
            )

    def rebuild(self, make: Callable[[TensorInfo], Any]) -> Value:
        """Return a value structured like the output, with tensors made by `make` in order."""
        return map_leaves(lambda leaf: isinstance(leaf, TensorInfo), make, self.output)


def wrong_gradient_shape(gradient: Tensor, shape: torch.Size) -> ModelError:
    """Return the error for a gradient that has not the `shape` of its output."""
    return ModelError(f"a gradient of shape {list(gradient.shape)} came back for an output of {list(shape)}.")


def _listed(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors)


@dataclass(frozen=True)
class LayerInput:
    """The input of a layer on the meta device, with the length of its sequence."""

    value: Value
    length: int = 0
    """Of the sequence of which `value` holds a part, see `NamedLayer.run`."""
    repeats: bool = False
    """Whether `value` contains the same tensor twice."""

    @staticmethod
    def of_batch(batch: Value, *, input_gradients: bool) -> LayerInput:
        """Return the input of a model's first layer, for a micro-batch with the shapes of `batch`."""

        def leaf(tensor: Tensor) -> Tensor:
            learns = input_gradients and tensor.is_floating_point()
            return leaf_of(torch.empty_like(tensor, device="meta"), learns)

        return LayerInput(map_tensors(leaf, batch))


@dataclass(frozen=True)
class InferredLayer:
    """What a layer's run on the meta device shows: shapes and dtypes, and the input of the next layer."""

    info: LayerInfo
    output: LayerInput
    """The layer's output as an input, on the meta device, without its graph."""

    def next_input(self) -> LayerInput:
        """Return the input of the next layer: tensors like the output's, detached from its graph."""
        infos = iter(self.info.tensors)
        leaf = map_tensors(lambda tensor: leaf_of(tensor, next(infos).requires_grad), self.output.value)
        return replace(self.output, value=leaf)


def infer(layers: Sequence[NamedLayer], batch: Value, *, input_gradients: bool) -> list[LayerInfo]:
    """Return one `LayerInfo` per layer (on the meta device), for a micro-batch with the shapes of `batch`."""
    given, infos = LayerInput.of_batch(batch, input_gradients=input_gradients), []
    for layer in layers:
        run, _ = run_on_meta(layer, given)
        infos.append(run.info)
        given = run.next_input()
    return infos


def run_on_meta(layer: NamedLayer, given: LayerInput, circumstances: str = "") -> tuple[InferredLayer, Value]:
    """Run a layer on the meta device; return its `InferredLayer`, and its output with the autograd graph.

    Raises ModelError, which names `circumstances`, where the layer does not run.
    """
    with _recording_hooked_outputs(layer.module) as hooked, recording_readers(layer.module) as record:
        (output, length), writes_input = _run(layer, given.value, given.length, circumstances)
    if writes_input and given.repeats:
        raise ModelError(
            f"layer {layer.path!r} writes to its input, in which one tensor stands twice: "
            "what one sees of the other's change would depend on the cut, so clone one of them."
        )
    infos = map_tensors(TensorInfo.of, output)
    returns_parameter = _share_memory(output, layer.module.parameters())
    attributes = [one for _, one in attribute_tensors(layer.module)]
    is_kept = _share_memory(output, [*hooked, *attributes])
    readers = _with_parts(layer, given, infos, record.readers)
    info = LayerInfo(writes_input, infos, given.length, returns_parameter, is_kept, readers=readers)
    ids = [id(tensor) for tensor in tensors_of(output)]
    without_graph = map_tensors(Tensor.detach, output)
    return InferredLayer(info, LayerInput(without_graph, length, len(set(ids)) < len(ids))), output


def _run(layer: NamedLayer, value: Value, length: int, circumstances: str) -> tuple[tuple[Value, int], bool]:
    """Return the result of `layer.run`, and whether it writes to its input: True if only clones work."""
    versions = [tensor._version for tensor in tensors_of(value)]
    try:
        output = _on_meta(layer, value, length)
        written = versions != [tensor._version for tensor in tensors_of(value)]
    except PlaitError:
        raise
    except Exception as error:
        try:
            output, written = _on_meta(layer, map_tensors(torch.clone, value), length), True
        except Exception:
            raise ModelError(
                f"layer {layer.path!r} ({type(layer.module).__name__}) does not run on "
                f"{_described(value)} ({circumstances}on the meta device; tensors that it keeps have to be "
                f"parameters, buffers or attributes): {type(error).__name__}: {error}"
            ) from error
    if not any(True for _ in tensors_of(output[0])):
        raise ModelError(
            f"layer {layer.path!r} gives no tensor: return one, or a tuple, list or dictionary of tensors."
        )
    return output, written


def _with_parts(
    layer: NamedLayer, given: LayerInput, infos: Value, readers: tuple[Readers, ...]
) -> tuple[Readers, ...]:
    """Return `readers` if the layer also runs where their outputs are parts of larger tensors; else none.

    `Tensor.view` may refuse such parts.
    """
    if not readers or not torch.is_grad_enabled():
        return ()  # an evaluation does not join them
    parts = PartialOutputs(layer.module, readers)
    try:
        with parts.giving_parts():
            output, _ = _on_meta(layer, map_tensors(torch.clone, given.value), given.length)
    except Exception:
        return ()
    return parts.readers if repr(map_tensors(TensorInfo.of, output)) == repr(infos) else ()


@contextmanager
def _recording_hooked_outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Context that records the outputs of submodules of `module` that have forward hooks."""
    found: list[Tensor] = []
    handles = [
        one.register_forward_hook(lambda module, given, output: found.extend(tensors_of(output)))
        for one in module.modules()
        if any(register == "register_forward_hook" for register, _ in call_hooks(one))
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _share_memory(output: Value, others: Iterable[Tensor]) -> bool:
    """Return whether a tensor of `output` is on the memory of one of the others."""
    storages = [one.untyped_storage() for one in others if one.layout == torch.strided]
    return any(tensor.untyped_storage() is storage for tensor in tensors_of(output) for storage in storages)


def _on_meta(layer: NamedLayer, value: Value, length: int) -> tuple[Value, int]:
    # Tensors that a layer makes without naming a device land on meta as well.
    with torch.device("meta"), torch.enable_grad():
        return layer.run(value, length)


def _described(value: Value) -> str:
    return _listed([(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(value)]) or "no tensor"
