"""What is left out means the same in a configuration and in Python, but for what is listed here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import plait
from plait.app.config.config import Config
from plait.app.config.model_section import ModelConfig
from plait.app.train.trainer import build_model
from plait.loop import Checkpoints

FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "model": (plait.models.gpt2, plait.models.llama),
    "data": (),
    "train": (plait.Plan, plait.fit, plait.parallelize, plait.Loader),
    "parallel": (plait.Plan, plait.Mesh),
    "run": (plait.launch, plait.verify, plait.Mesh, Checkpoints),
}
"""By section of the configuration: what has parameters of the same names."""
OTHERWISE = {
    "model.layers": "a model that trains in a minute",
    "model.hidden": "the same",
    "model.heads": "the same",
    "model.vocab": "the tokenizer's",
    "model.context": "a model that trains in a minute",
    "model.top_k": "none in a model without experts; in one with experts 2, as in Python",
    "train.precision": "fp32, whatever the weights in a folder are; in Python a model keeps its own",
    "train.microbatches": "gradients are the same; pipelines need several",
    "train.steps": "fit has to be told",
    "train.batch": "a Loader has to be told",
    "train.clip": "a recipe, as AdamW's betas and the warm-up are",
    "train.optimizer": "a table with options; its class is AdamW, too",
    "train.schedule": "the learning rate; that of a plan is the order of actions",
    "run.timeout": "there is no code of the user's between steps",
    "run.resume": "a command that is repeated starts over; a Checkpoints callback is there to go on",
    "run.device": "None is auto",
}
"""Fields whose default differs from that of a parameter of the same name, and why."""


def differing() -> Iterator[str]:
    for section, fields in Config():
        for name, value in fields:
            for function in FUNCTIONS[section]:
                parameter = inspect.signature(function).parameters.get(name)
                # A field that completes itself (model.tied) is compared below.
                if (
                    parameter is not None
                    and value != parameter.default
                    and f"{section}.{name}" != "model.tied"
                ):
                    yield f"{section}.{name}"


def test_defaults_of_the_configuration_are_those_of_python() -> None:
    assert {*differing()} == {*OTHERWISE}


def test_the_plan_of_a_configuration_is_the_default_plan() -> None:
    plan = Config().plan()
    same = dataclasses.replace(plan, precision=None, master_precision=None, microbatches=1)
    assert same == plait.Plan()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_head_is_tied_where_the_family_has_it_tied(name: str) -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "context": 4}
    of_python = getattr(plait.models, name)(vocab=9, **sizes)
    of_configuration = build_model(ModelConfig(name=name, **sizes), 9)
    assert [*of_configuration.state_dict()] == [*of_python.state_dict()]
    assert len([*of_configuration.parameters()]) == len([*of_python.parameters()])
