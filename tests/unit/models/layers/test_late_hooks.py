"""Hooks that come after `parallelize` are told, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import nn

import plait

LATE: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "call": (lambda model: model[0].register_forward_hook(print), "by 0.register_forward_hook"),
    "model": (lambda model: model.register_full_backward_hook(print), "by register_full_backward_hook"),
    "gradient": (lambda model: model[1].weight.register_hook(abs), "by 1.weight.register_hook"),
}


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def step(engine: plait.engine.Engine) -> None:
    engine.forward_backward(torch.ones(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize("late", LATE)
def test_a_hook_registered_after_parallelize_is_warned_of_once(late: str) -> None:
    plan, model = plait.Plan(), small()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    step(engine)
    register, told = LATE[late]
    register(model)
    with pytest.warns(UserWarning, match=rf"a hook was registered or removed {told} of the model after"):
        step(engine)
    step(engine)


def test_hooks_set_before_parallelize_give_no_warning_and_the_engine_does_not_keep_the_model() -> None:
    plan, model = plait.Plan(), small()
    model[0].register_forward_hook(lambda *_: None)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    model[1].register_forward_pre_hook(print).remove()  # as tools do that look at a model
    step(engine)
    kept = ref(model[0].weight)
    del model
    assert kept() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(engine)
