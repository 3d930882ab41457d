from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.tensor_sources import LocalSource, locate_tensors
from plait.errors import MOST_LISTED, ModelError


class Shift(nn.Module):
    """With buffers: floating-point, whole numbers, and one that is not saved."""

    shift: Tensor
    order: Tensor
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("order", torch.randperm(3, dtype=torch.int32))
        self.register_buffer("factor", torch.rand(()), persistent=False)
        self.linear = nn.Linear(3, 3)


class Slice:
    """What safetensors hands out before anything is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class OneAtATime(Mapping[str, Tensor]):
    """Reads a tensor when it is asked for, and only once the one before was let go."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.last: weakref.ref[Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        assert self.last is None or self.last() is None, f"{name} is read while another tensor is held"
        memory = self.tensors[name].numpy().copy()  # lives as long as any tensor that lies in it
        self.last = weakref.ref(memory)
        return torch.from_numpy(memory)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def layers_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    return list(model._modules.items())  # type: ignore[arg-type]


def small() -> nn.Sequential:
    """Four tensors by six names: a tied weight, and a layer that stands twice."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Shift(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.append(model[0])
    return model


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return small()


def values_of(model: nn.Sequential, given: Any = None, seed: int = 0) -> LocalSource:
    return LocalSource(locate_tensors(layers_of(model)), seed, given)


def test_tensor_locations_have_the_names_of_the_state_dict() -> None:
    model = small()
    places = locate_tensors(layers_of(model))
    assert {name: place.saved_as for name, place in places.items()} == {
        "0.weight": ("0.weight", "2.weight", "3.weight"),
        "1.linear.weight": ("1.linear.weight",),
        "1.linear.bias": ("1.linear.bias",),
        "1.shift": ("1.shift",),
        "1.order": ("1.order",),
        "1.factor": (),
        "2.bias": ("2.bias",),
    }
    assert {alias for place in places.values() for alias in place.saved_as} == model.state_dict().keys()
    assert [name for name, place in places.items() if place.is_buffer] == ["1.shift", "1.order", "1.factor"]


def test_a_tensor_shared_within_a_layer_is_located_once_with_both_names() -> None:
    layer = nn.Module()
    layer.first, layer.second = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.second.weight = layer.first.weight
    places = locate_tensors([("", layer)])
    assert places["first.weight"].saved_as == ("first.weight", "second.weight")
    assert list(places) == ["first.weight", "first.bias", "second.bias"]


@pytest.mark.parametrize("family", [plait.models.gpt2, plait.models.llama])
def test_plaits_own_models_take_their_state_dicts(family: Any) -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 5, "context": 4}
    model = family(**sizes)
    given = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = [name for name in given if name.startswith("head.") and given[name].shape == (5, 8)]
    for name in tied:
        given[name] = given["embedding.token.weight"]
    places = locate_tensors([(name, module) for name, module in model._modules.items()])
    values = LocalSource(places, 0, given)
    assert all(torch.equal(values.read(name), given[name]) for name in places)


def test_without_given_values_the_model_keeps_its_own() -> None:
    model = small()
    values = values_of(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert values.read(name).data_ptr() == tensor.data_ptr()
        assert not values.read(name).requires_grad
    assert [tuple(known.shape) for _, known in values.known()] == [(3, 3), (3, 3), (3,), (3,), (3,), (), (3,)]


def test_on_meta_rules_make_values_and_nothing_is_known() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    assert list(values_of(model).known()) == []
    first, again, other = (values_of(model, seed=seed).read("0.weight") for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("make", [small, on_meta])
def test_given_values_stand_in_place_of_the_models_own(make: Any) -> None:
    given = small().state_dict()
    model = make()
    values = values_of(model, given)
    for name in given.keys() - {"2.weight", "3.weight"}:
        assert torch.equal(values.read(name), given[name])
    known = [given[name] for name in ("0.weight", "1.linear.weight", "1.linear.bias", "1.shift", "1.order")]
    known += [model[1].factor] if make is small else []  # it is not saved, so nobody can give it
    known.append(given["2.bias"])
    assert all(torch.equal(one, other) for (_, one), other in zip(values.known(), known, strict=True))


@pytest.mark.parametrize("alias", ["0.weight", "2.weight", "3.weight"])
def test_the_value_of_a_shared_tensor_may_be_given_under_any_of_its_names(alias: str) -> None:
    given = small().state_dict()
    shared = given["0.weight"]
    kept = {
        name: tensor for name, tensor in given.items() if name not in ("0.weight", "2.weight", "3.weight")
    }
    assert values_of(on_meta(), {**kept, alias: shared}).read("0.weight") is not None
    assert torch.equal(values_of(on_meta(), {**kept, alias: shared}).read("0.weight"), shared)


def test_given_values_may_be_slices_or_memory_mapped_tensors(tmp_path: Path) -> None:
    given = small().state_dict()
    torch.save(given, tmp_path / "values.pt")
    mapped = torch.load(tmp_path / "values.pt", mmap=True)
    slices = {name: Slice(tensor) for name, tensor in given.items()}
    for source in (mapped, slices):
        values = values_of(on_meta(), source)
        assert all(torch.equal(values.read(name), given[name]) for name in ("0.weight", "1.order", "2.bias"))


def test_given_buffers_are_converted_and_given_parameters_of_another_kind_refused() -> None:
    given = small().state_dict()
    given["2.bias"] = given["2.bias"].to(torch.bfloat16)
    given["1.order"] = given["1.order"].to(torch.int64)
    values = values_of(on_meta(), given)
    assert values.read("2.bias").dtype == torch.bfloat16, "who fills a parameter converts"
    assert values.read("1.order").dtype == torch.int32
    given["2.bias"] = torch.tensor([1, 2, 3])
    with pytest.raises(ModelError) as caught:
        values.read("2.bias")
    assert str(caught.value) == (
        "the given value of 2.bias is torch.int64, but the model has torch.float32: convert it."
    )


def test_all_given_values_that_do_not_fit_are_named_at_once() -> None:
    given: dict[str, Any] = dict(small().state_dict())
    del given["1.shift"], given["2.bias"]
    given["1.linear.bias"] = torch.zeros(4)
    given["1.linear.weight"] = torch.zeros(3, 3, device="meta")
    given["1.order"] = [0, 1, 2]
    given["1.factor"] = torch.tensor(1.0)
    given["module.0.weight"] = torch.zeros(3, 3)
    given["3.weight"] = given["3.weight"] + 1
    with pytest.raises(ModelError) as caught:
        values_of(on_meta(), given).read("0.weight")
    assert str(caught.value) == (
        "the given values do not fit the model (missing: 1.shift, 2.bias; unexpected: 1.factor, "
        "module.0.weight; unfit: 1.linear.weight is on the meta device, 1.linear.bias is [4] and not [3], "
        "1.order is a list; one tensor in the model but two values: 0.weight and 3.weight): give a tensor "
        "of the right shape for each name in model.state_dict()."
    )


def test_of_many_unexpected_names_the_first_20_are_listed() -> None:
    given = {f"layer.{number}": torch.zeros(1) for number in range(MOST_LISTED + 7)}
    with pytest.raises(ModelError, match=r"unexpected: layer\.0, .*, layer\.19 and 7 more\)"):
        values_of(on_meta(), given).read("0.weight")


@pytest.mark.parametrize("given", ["model.pt", [torch.zeros(1)], nn.Linear(1, 1)])
def test_given_values_that_are_no_mapping_are_refused(given: Any) -> None:
    told = rf"values is a {type(given).__name__}: give tensors by name, such as model\.state_dict\(\)\."
    with pytest.raises(ModelError, match=told):
        list(values_of(on_meta(), given).known())


def test_given_values_are_read_one_tensor_at_a_time() -> None:
    tensors = small().state_dict()
    del tensors["2.weight"], tensors["3.weight"]
    given = OneAtATime(tensors)
    values = values_of(on_meta(), given)
    for name in ("2.bias", "0.weight", "1.order"):
        assert torch.equal(values.read(name), tensors[name])
    for _, known in values.known():
        assert known is not None
        del known
    held = values.read("2.bias")
    with pytest.raises(AssertionError, match="while another tensor is held"):
        values.read("0.weight")
    del held
