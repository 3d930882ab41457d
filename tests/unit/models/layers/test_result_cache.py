"""Layers compute what depends on shapes alone once, and nobody else can tell."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.engine.fingerprint import structure_of
from plait.models import result_cache
from plait.models.result_cache import ResultCache, result_caches


class Scaling(nn.Module):
    """Multiplies by a ramp as long as its input."""

    def __init__(self, cache: ResultCache) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.cache = cache
        self.computed = 0

    def forward(self, x: Tensor) -> Tensor:
        (ramp,) = self.cache.get(len(x), x, lambda: self._ramp(x))
        return x * ramp * self.weight

    def _ramp(self, x: Tensor) -> tuple[Tensor]:
        self.computed += 1
        return (torch.arange(len(x), device=x.device).float(),)


def two() -> nn.Sequential:
    cache = ResultCache()
    return nn.Sequential(Scaling(cache), Scaling(cache))


def computed(model: nn.Sequential) -> list[int]:
    return [layer.computed for layer in model]  # type: ignore[misc]


def test_layers_share_one_result_until_the_key_or_the_device_changes() -> None:
    model = two()
    for _ in range(3):
        assert model(torch.ones(3)).tolist() == [0.0, 1.0, 4.0]
    assert computed(model) == [1, 0]
    assert model[0].cache.nbytes == 3 * 4
    model(torch.ones(4))
    assert computed(model) == [2, 0]
    assert model[0].cache.nbytes == 4 * 4, "the last result only"


def test_devices_have_results_of_their_own() -> None:
    cache = ResultCache()
    for device in ("cpu", "meta", "meta", "cpu"):
        like = torch.ones(2, device=device)
        (result,) = cache.get("key", like, lambda one=like: (torch.zeros_like(one),))  # type: ignore[misc]
        assert result.device.type == device


def test_a_result_of_inference_serves_a_later_backward() -> None:
    model = two()
    with torch.inference_mode():
        model(torch.ones(3))
    model(torch.ones(3)).sum().backward()
    assert computed(model) == [1, 0]
    assert model[0].weight.grad.item() == 5.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_share_a_cache_of_their_own_which_is_empty(copied: Any) -> None:
    model = two()
    model(torch.ones(3))
    twin = copied(model)
    caches = [cache for *_, cache in result_caches(twin)]
    assert len(caches) == 2
    assert caches[0] is caches[1]
    assert caches[0] is not model[0].cache
    assert caches[0].nbytes == 0
    assert twin(torch.ones(3)).tolist() == [0.0, 1.0, 4.0]


def test_a_result_cache_is_no_part_of_state_dict_or_structure_key() -> None:
    model, fresh = two(), two()
    model(torch.ones(3))
    for layer in (*model, *fresh):
        layer.computed = 0  # type: ignore[assignment]
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    assert not list(model.buffers())
    assert structure_of(model) == structure_of(fresh)
    assert structure_of(model[0]) == structure_of(model[1]) == structure_of(fresh[0])
    apart = nn.Sequential(Scaling(ResultCache()), Scaling(ResultCache()))
    assert structure_of(apart) != structure_of(fresh), "which layers share one counts"


class Subclass(Tensor):
    pass


def test_a_result_computed_in_a_trace_or_graph_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two()
    model(torch.ones(3).as_subclass(Subclass))
    assert computed(model) == [1, 1]
    for owner, name in ((torch.compiler, "is_compiling"), (result_cache, "captures_graph")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: True)
            model(torch.ones(3))
    assert computed(model) == [3, 3]
    assert model[0].cache.nbytes == 0
