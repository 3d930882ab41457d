from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.layers.layer_sequence import private_copy, sequence_of
from plait.models.layers.shape_inference import LayerInfo, TensorInfo, infer
from plait.tensor.nested_values import Value


class Call(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Value) -> Value:
        return self.function(value)


def infos_of(*layers: nn.Module, batch: Value, input_gradients: bool = False) -> list[LayerInfo]:
    with torch.device("meta"):
        sequence = sequence_of(nn.Sequential(*layers).to("meta"))
    return infer(private_copy(sequence.layers, {}), batch, input_gradients=input_gradients)


def test_shapes_dtypes_and_gradients_of_each_boundary() -> None:
    infos = infos_of(
        nn.Embedding(10, 6),
        nn.Linear(6, 4),
        Call(lambda x: {"logits": x.double(), "best": x.argmax(-1), "name": "kept"}),
        batch=torch.zeros(3, 5, dtype=torch.int64),
    )
    assert infos[0] == LayerInfo(False, TensorInfo((3, 5, 6), torch.float32, True))
    assert infos[1].tensors == [TensorInfo((3, 5, 4), torch.float32, True)]
    assert infos[2].tensors == [
        TensorInfo((3, 5, 4), torch.float64, True),
        TensorInfo((3, 5), torch.int64, False),
    ]
    assert infos[2].rebuild(lambda info: len(info.shape)) == {"logits": 3, "best": 2, "name": "kept"}


@pytest.mark.parametrize("input_gradients", [True, False])
def test_frozen_layers_give_what_needs_no_gradient(input_gradients: bool) -> None:
    infos = infos_of(
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2),
        Call(Tensor.detach),
        batch=torch.zeros(3, 2),
        input_gradients=input_gradients,
    )
    needed = [info.tensors[0].requires_grad for info in infos]
    assert needed == [input_gradients, True, False]


def test_whole_numbers_never_need_a_gradient() -> None:
    (info,) = infos_of(Call(lambda x: x), batch=torch.zeros(3, dtype=torch.int64), input_gradients=True)
    assert info.tensors == [TensorInfo((3,), torch.int64, False)]


def write(value: Tensor) -> Tensor:
    with torch.no_grad():
        value.add_(1)
    return value * 2


@pytest.mark.parametrize(
    ("layer", "writes"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.ReLU(), False),
        (Call(write), True),
        (Call(lambda x: x[0].mul_(2)), True),
        (Call(lambda x: x.clone().mul_(2)), False),
    ],
    ids=["relu in place", "relu", "under no_grad", "a view", "a copy"],
)
@pytest.mark.parametrize(
    "first", [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)], ids=["leaf", "frozen"]
)
def test_layers_that_write_to_their_input_are_found(layer: nn.Module, writes: bool, first: nn.Module) -> None:
    infos = infos_of(first, layer, batch=torch.zeros(3, 2))
    assert [info.writes_input for info in infos] == [False, writes]


def test_a_layer_that_fails_is_named_with_what_it_was_given() -> None:
    with pytest.raises(
        ModelError, match=r"layer '1' \(Linear\) does not run on torch.float32 \[3, 2\] .*: RuntimeError"
    ):
        infos_of(nn.Linear(2, 2), nn.Linear(5, 2), batch=torch.zeros(3, 2))


@pytest.mark.parametrize("output", [None, "text", (1, 2)])
def test_a_layer_that_gives_no_tensor_is_named(output: object) -> None:
    with pytest.raises(ModelError, match="layer '0' gives no tensor: return one"):
        infos_of(Call(lambda x: output), batch=torch.zeros(3, 2))


def test_a_plait_error_in_shape_inference_keeps_its_message() -> None:
    def refuse(value: Tensor) -> Tensor:
        raise ModelError("too long.")

    with pytest.raises(ModelError, match=r"^too long\.$"):
        infos_of(Call(refuse), batch=torch.zeros(3, 2))


def test_tensors_created_during_shape_inference_are_on_meta() -> None:
    (info,) = infos_of(Call(lambda x: x + torch.arange(2)), batch=torch.zeros(3, 2))
    assert info.tensors == [TensorInfo((3, 2), torch.float32, False)]


def test_shape_inference_changes_no_real_tensor() -> None:
    norm = nn.BatchNorm1d(2)
    twins = {id(t): torch.empty_like(t, device="meta") for t in norm.buffers()}
    twins |= {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in norm.parameters()}
    batch = torch.randn(3, 2)
    before = batch.clone()
    infer(private_copy(sequence_of(norm).layers, twins), batch, input_gradients=True)
    assert norm.num_batches_tracked.item() == 0
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert torch.equal(batch, before)
    assert not batch.requires_grad


class Chain(nn.Module):
    """Layers that are one layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.chain = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        return self.chain(input)


class Keeping(nn.Linear):
    """Keeps its output in a dictionary, whole or the first of its rows."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.kept = {"output": output[:1].detach()}
        return output


def test_outputs_that_hooks_get_or_attributes_hold_are_found() -> None:
    def hooked(*layers: nn.Module) -> nn.Module:
        layers[0].register_forward_hook(lambda module, given, output: None)
        return Chain(*layers)

    before = nn.Linear(2, 2)
    before.register_forward_pre_hook(lambda module, given: None)
    layers = {
        "a linear": (nn.Linear(2, 2), False),
        "an attribute": (Keeping(2, 2), True),
        "a hook of the linear": (hooked(nn.Linear(2, 2)), True),
        "a hook that gets a tensor, of which the output is a view": (
            hooked(nn.Linear(2, 2), nn.Flatten()),
            True,
        ),
        "a hook of a norm before": (hooked(nn.LayerNorm(2), nn.Linear(2, 2)), False),
        "a hook before": (before, False),
    }
    infos = infos_of(*(one for one, _ in layers.values()), batch=torch.zeros(3, 2))
    found = {name: info.output_is_kept for name, info in zip(layers, infos, strict=True)}
    assert found == {name: is_kept for name, (_, is_kept) in layers.items()}
