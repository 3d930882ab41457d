"""Arguments of public functions of another type than asked for, or out of range, are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait
from plait.app.loop.fit import FitResult
from plait.engine import Engine
from plait.errors import PlaitError
from plait.loop import (
    Checkpoints,
    Csv,
    EarlyStop,
    History,
    Log,
    ParameterRate,
    ReplicaChecks,
    Report,
    Validation,
    freeze,
    parameter_groups,
    warmup_constant,
    warmup_cosine,
    warmup_stable_decay,
)
from plait.plan.plan import Plan

DATA = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
WHOLE, COUNT = "give a whole number of at least 1", "give a whole number of at least 0"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def fit(**given: Any) -> object:
    return plait.fit(model(), Plan(), plait.Loader(DATA, batch=4), **({"steps": 1} | given))


def validated(**given: Any) -> object:
    return fit(validation=plait.Loader(DATA, batch=4), **given)


def parallelized(**given: Any) -> Engine:
    plan = Plan()
    return plait.parallelize(model(), plan, plait.Mesh(plan), nn.CrossEntropyLoss(), **given)


def mean_accuracy(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(1) == targets).double().mean()


SMALL: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "context": 8}
TINY = Path("nowhere")
HEADS = torch.zeros(1, 2, 4, 8)
THREE_HEADS, LEARNED = torch.zeros(1, 3, 4, 8), nn.Parameter(torch.ones(()))
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: plait.attention(HEADS[0], HEADS, HEADS), "attention was given a query [2, 4, 8]: give a tensor"),
    (lambda: plait.attention(HEADS, HEADS, "k"), "attention was given a value"),  # type: ignore[arg-type]
    (
        lambda: plait.attention(HEADS[:, :, :1], HEADS, HEADS),
        "given a query of 1 positions and a key of 4, and a",
    ),
    (
        lambda: plait.attention(THREE_HEADS, HEADS, HEADS),
        "was given 3 query heads and 2 of keys: give a multiple",
    ),
    (lambda: plait.attention(HEADS, HEADS, HEADS, scale=LEARNED), "given a scale that needs a gradient"),  # type: ignore[arg-type]
    (lambda: plait.attention(HEADS, HEADS, HEADS, softcap=math.inf), "softcap = inf: give a bound above 0"),
    (lambda: plait.attention(HEADS, HEADS, HEADS, window=True), "window = True: give a number, or None"),
    (lambda: plait.attention(HEADS, HEADS, HEADS, scale="1"), "scale = '1': give a number"),  # type: ignore[arg-type]
    (lambda: plait.attention(HEADS, HEADS, HEADS, dropout=0.1), "dropout = 0.1: give a module"),  # type: ignore[arg-type]
    (lambda: plait.positions(torch.zeros(3)), "plait.positions was given [3]: give a tensor [rows, length"),
    (lambda: plait.save(model(), None, "a"), "the engine is an object of Sequential: give what plait.paral"),  # type: ignore[arg-type]
    (lambda: plait.load(model(), None, "a"), "the engine is an object of Sequential: give what plait.paral"),  # type: ignore[arg-type]
    (lambda: plait.sequence_part(HEADS, Plan(), "0"), "plait.sequence_part was given the index '0'"),  # type: ignore[arg-type]
    (lambda: plait.lora(model(), targets=3), "targets of lora is an object of int: give the paths"),  # type: ignore[arg-type]
    (lambda: freeze(model(), [3]), "a pattern of freeze is an object of int: give a text"),  # type: ignore[list-item]
    (lambda: parameter_groups(model(), []), "the engine is an object of Sequential"),  # type: ignore[arg-type]
    (lambda: warmup_stable_decay(0.1, steps=9, warmup="2"), "warmup is '2': give a whole number"),  # type: ignore[arg-type]
    (
        lambda: warmup_constant(0.1, warmup=np.int64(2)),
        "warmup is np.int64(2), a number of numpy: give int(…)",
    ),
    *(
        (lambda steps=steps: fit(steps=steps), f"steps is {steps!r}: {WHOLE}")
        for steps in (True, 2.5, 0, "3")
    ),
    (lambda: validated(validate_every=-1), f"validate_every is -1: {COUNT}"),
    (lambda: validated(validate_every=True), f"validate_every is True: {COUNT}"),
    (lambda: validated(validate_batches=0), f"validate_batches is 0: {WHOLE}"),
    (lambda: validated(validate_batches=1.5), f"validate_batches is 1.5: {WHOLE}"),
    (lambda: fit(validate_batches=2), "validate_batches or metrics are given, but no batches"),
    (lambda: fit(validation={}), "validation is a dictionary with no data"),
    (
        lambda: validated(metrics={"mean": mean_accuracy}),
        "the metric mean returned one number, of which no mean",
    ),
    (lambda: validated(metrics={"a,b": mean_accuracy}), "a metric is called 'a,b': give a name of letters"),
    (lambda: validated(metrics={"a": 3}), "the metric a is 3: give a function"),
    (lambda: fit(clip=0), "clip is 0: give a number above 0, or math.inf for no clipping"),
    (lambda: fit(clip=None), "clip is None: give a number above 0"),
    (lambda: fit(weight_decay=True), "weight_decay is True: give a number of at least 0"),
    (lambda: fit(learning_rate=-1.0), "learning_rate is -1.0: give a number of at least 0"),
    (lambda: fit(learning_rate=math.nan), "learning_rate is nan: give a number"),
    (lambda: fit(seed=-1), f"seed is -1: {COUNT}"),
    (lambda: fit(broadcast="no"), "broadcast is 'no': give True or False"),
    (lambda: fit(callbacks=History()), "callbacks is an object of History: give a list of callbacks"),
    (lambda: fit(callbacks=[History]), "a callback is the class History: give objects of subclasses of"),
    (
        lambda: fit(optimizer=lambda groups: [torch.optim.SGD(groups)]),
        "what optimizer returns is an object of list",
    ),
    (lambda: fit(mesh="cpu"), "the mesh is an object of str: give plait.Mesh"),
    *(
        (
            lambda given=given: plait.Loader(DATA, **({"batch": 4} | given)),
            f"a loader's {next(iter(given))} is ",
        )
        for given in (
            *({"batch": 2.5}, {"batch": True}, {"seed": -1}, {"workers": True}, {"ahead": 1.5}),
            *({"shuffle": "no"}, {"context": "frok"}, {"collate": 3}),
        )
    ),
    (lambda: Checkpoints(TINY, keep_best=-1), "keep_best, unless it is True or False, is -1: give a whole"),
    (lambda: Checkpoints(TINY, keep_best="no"), "keep_best, unless it is True"),  # type: ignore[arg-type]
    (lambda: Checkpoints(TINY, minutes=-1), "minutes is -1: give a number of at least 0"),
    (
        lambda: Checkpoints(TINY, minutes=1, every=None),
        "minutes is 1, but every is None, so that nothing is saved",
    ),
    (lambda: ParameterRate("a", scale=-1), "scale of a ParameterRate is -1: give a number of at least 0"),
    (lambda: ParameterRate(3), "pattern of a ParameterRate is an object of int"),  # type: ignore[arg-type]
    (lambda: freeze(model(), "bias"), "freeze is 'bias': give a list of patterns, such as ['bias']"),
    (lambda: warmup_stable_decay(1.0, steps=9, decay=0), f"decay is 0: {WHOLE}"),
    (lambda: warmup_constant(1.0, warmup=-1), f"warmup is -1: {COUNT}"),
    (lambda: Checkpoints(TINY, every=True), f"every is True: {COUNT}"),
    (lambda: Checkpoints(TINY, every=2.5), f"every is 2.5: {COUNT}"),  # type: ignore[arg-type]
    (lambda: Checkpoints(TINY, keep_last=-1), f"keep_last is -1: {COUNT}"),
    (lambda: Checkpoints(TINY, keep_every=-1), f"keep_every is -1: {COUNT}"),
    (lambda: Checkpoints(TINY, resume=True), "resume is an object of bool: give"),  # type: ignore[arg-type]
    (lambda: Checkpoints(TINY, watch="a"), "watch is 'a', but keep_best is False"),
    (lambda: Validation(None, every=2.5), f"every is 2.5: {COUNT}"),  # type: ignore[arg-type]
    (lambda: Validation(None, name="a b"), "a Validation is called 'a b': give a name"),
    (lambda: Checkpoints(3), "Checkpoints' folder is 3: give a path"),  # type: ignore[arg-type]
    (lambda: Checkpoints(""), "Checkpoints' folder is '': give a path"),
    (lambda: Checkpoints(TINY, state=0), "state is an object of int: give a dictionary"),  # type: ignore[arg-type]
    (lambda: Checkpoints(TINY, state={"step": 3}), "state has step, which a run saves itself"),
    (lambda: Checkpoints(TINY, check=True), "check is True: give a function"),  # type: ignore[arg-type]
    (lambda: Report(None), "Report's folder is None: give a path"),  # type: ignore[arg-type]
    (lambda: Report(TINY, locks=0), "Report's locks is 0: give True"),  # type: ignore[arg-type]
    (lambda: Csv([]), "a logger's path is []: give a path"),  # type: ignore[arg-type]
    (lambda: Csv(TINY, columns=3), "Csv's columns are 3: give a list"),  # type: ignore[arg-type]
    (lambda: Validation(None, metrics=0), "metrics is an object of int"),  # type: ignore[arg-type]
    (lambda: EarlyStop(1, watch=1), "watch is an object of int: give the name"),  # type: ignore[arg-type]
    (lambda: fit(validate_every=None), f"validate_every is None: {COUNT}"),
    (lambda: fit(metrics=[]), "metrics is an object of list: give a dictionary"),
    (lambda: plait.lora(3), "the model is an object of int: give a torch.nn.Module"),  # type: ignore[type-var]
    (lambda: plait.memory(model(), Plan(), rules=3), "rules is 3: give a dictionary"),  # type: ignore[arg-type]
    (lambda: plait.memory(model(), Plan(), device="2"), "device is '2': give a torch.device"),
    (lambda: plait.models.llama(**SMALL | {"hidden": "8"}), f"model.hidden is '8': {WHOLE}"),
    (lambda: plait.models.llama(**SMALL | {"rope_base": "1"}), "model.rope_base is '1': give a number"),
    *(
        (lambda ranks=ranks: plait.launch(int, ranks=ranks), f"ranks is {ranks!r}: {WHOLE}")
        for ranks in ("2", 2.0, 0, -1, math.nan, [], ())
    ),
    *(
        (lambda timeout=timeout: plait.launch(int, timeout=timeout), f"timeout is {timeout!r}: give a number")
        for timeout in (math.nan, -math.inf, 0, "3", None, True)
    ),
    (lambda: plait.Dropout("2"), "dropout has p = '2': give a probability"),  # type: ignore[arg-type]
    (lambda: plait.Dropout(True), "dropout has p = True: give a probability"),
    (
        lambda: plait.schedule("1f1b", ranks=2, microbatches=2, rank_of=(0, 1)),
        "rank_of = [0, 1] is given for the policy 1f1b",
    ),
    (
        lambda: plait.schedule("auto", ranks=2, microbatches=2, rank_of=3),  # type: ignore[arg-type]
        "rank_of is 3: give the rank of each stage",
    ),
    (
        lambda: plait.check(plait.schedule("1f1b", ranks=2, microbatches=2), memory_costs=3),  # type: ignore[arg-type]
        "memory_costs is an object of int",
    ),
    (lambda: fit(notes=3), "notes is an object of int: give a text"),
    (lambda: plait.fit(model(), 2, plait.Loader(DATA, batch=4), steps=1), "plan is an object of int: give a"),  # type: ignore[arg-type]
    (lambda: ParameterRate("a", weight_decay=-1), "weight_decay of a ParameterRate is -1: give a number"),
    (lambda: parameter_groups(parallelized(), "a"), "a rate is an object of str: give a plait.loop.P"),  # type: ignore[arg-type]
    (lambda: parameter_groups(parallelized(), {}), "rates is an object of dict: give a list"),  # type: ignore[arg-type]
    (lambda: freeze(3, ["bias"]), "the model is an object of int: give a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: freeze(model(), 3), "freeze is an object of int: give a list of patterns"),  # type: ignore[arg-type]
    (lambda: warmup_cosine("1", steps=10), "peak is '1': give a number of at least 0"),  # type: ignore[arg-type]
    (lambda: warmup_cosine(1.0, steps=0), f"steps is 0: {WHOLE}"),
    (lambda: warmup_stable_decay(1.0, steps=0), f"steps is 0: {WHOLE}"),
    (lambda: warmup_cosine(1.0, steps=10, floor=-1), "floor is -1: give a number of at least 0"),
    (lambda: Report(TINY, field=3), "Report's field is an object of int: give the name of a field"),  # type: ignore[arg-type]
    (lambda: Report(TINY, page=0), "Report's page is 0: give True"),  # type: ignore[arg-type]
    (lambda: Report(TINY, metrics=0), "Report's metrics is 0: give True"),  # type: ignore[arg-type]
    (lambda: Validation(None, count=0), f"Validation's count is 0: {WHOLE}"),
    (lambda: Checkpoints(TINY, start_over=3), "start_over is an object of int: give the words"),  # type: ignore[arg-type]
    (lambda: plait.lora(model(), alpha=0), "the alpha of an adapter is 0: give a number above 0"),
    (lambda: plait.lora(model(), dropout=-1), "the dropout of an adapter is -1: give a number of at least 0"),
    (
        lambda: plait.lora(model(), dropout=1),
        "an adapter has dropout = 1: give a probability from 0, and below 1",
    ),
    (lambda: plait.lora(model(), targets=[3]), "a target of lora is an object of int: give the paths"),  # type: ignore[list-item]
    (lambda: plait.lora(model(), targets=[]), "lora has no targets: name linears"),
    (
        lambda: plait.save(parallelized(), None, 3),
        "the path of a checkpoint is an object of int: give a path",
    ),  # type: ignore[arg-type]
    (
        lambda: plait.load(parallelized(), None, 3),
        "the path of a checkpoint is an object of int: give a path",
    ),  # type: ignore[arg-type]
    (lambda: EarlyStop(True), f"patience is True: {WHOLE}"),
    (lambda: ReplicaChecks(-1), f"ReplicaChecks' every is -1: {COUNT}"),
    (lambda: Report(TINY, step=-1), f"Report's step is -1: {COUNT}"),
    (lambda: Log("rows.jsonl"), "Log was given 'rows.jsonl', without begin, write"),  # type: ignore[arg-type]
    (lambda: Csv(TINY, columns=["loss"]), "Csv's columns are ['loss']: give a list of names, of which step"),
    (lambda: warmup_cosine(1.0, steps=10, warmup=2.5), f"warmup is 2.5: {COUNT}"),  # type: ignore[arg-type]
    (lambda: warmup_cosine(1.0, steps=10, floor=2), "falls to floor = 2 from peak = 1: give a lower floor"),
    (lambda: plait.launch(int, ranks=True), f"ranks is True: {WHOLE}"),
    (lambda: plait.launch(int, threads=0), f"threads is 0: {WHOLE}"),
    (lambda: plait.launch(int, timeout=-1), "timeout is -1: give a number above 0"),
    (lambda: plait.launch(int, device="gpu"), "device is 'gpu': "),
    (lambda: plait.Mesh(pp=1, timeout=0), "the mesh's timeout is 0: give a number above 0"),
    (lambda: plait.Mesh(pp=1, guarded="yes"), "the mesh's guarded is 'yes': give True"),  # type: ignore[arg-type]
    (lambda: plait.Mesh(pp=1, device="gpu"), "the mesh's device is 'gpu' ("),
    (lambda: plait.Mesh(3), "the mesh's plan is an object of int: give a plait.Plan"),  # type: ignore[arg-type]
    (lambda: Plan(compile="True"), "plan.compile is 'True': choose one of True, False, graphs"),  # type: ignore[arg-type]
    (lambda: plait.simulate(3), "the schedule is an object of int: give one of"),  # type: ignore[arg-type]
    (lambda: plait.check("1f1b"), "the schedule is an object of str: give one of"),  # type: ignore[arg-type]
    (lambda: plait.models.gpt2(**SMALL | {"layers": True}), f"model.layers is True: {WHOLE}"),
    (lambda: plait.models.llama(**SMALL | {"hidden": 8.0}), f"model.hidden is 8.0: {WHOLE}"),
    (lambda: plait.models.gpt2(**SMALL, tied="no"), "model.tied is 'no': give True or False"),  # type: ignore[arg-type]
    (lambda: plait.models.llama(**SMALL, tied=0), "model.tied is 0: give True or False"),  # type: ignore[arg-type]
    (lambda: plait.save(parallelized(), None, TINY, wait=0), "wait is 0: give True or False"),  # type: ignore[call-overload]
    (lambda: plait.lora(model(), rank=True), f"the rank of an adapter is True: {WHOLE}"),
    (lambda: plait.memory(model(), None), "the plan is an object of NoneType: give"),  # type: ignore[arg-type]
    (lambda: plait.predict(model(), Plan(), 3), "hardware is an object of int: give"),  # type: ignore[arg-type]
    (lambda: parallelized(rules=3), "rules is an object of int: give a dictionary of rules"),
    (
        lambda: parallelized().evaluate(torch.ones(2, 4), torch.ones(2).long(), rows=True),
        f"rows is True: {COUNT}",
    ),
    (
        lambda: parallelized().evaluate(torch.ones(2, 4), torch.ones(2).long(), rows=3),
        "3 rows of inputs of 2",
    ),
    (lambda: parallelized().clip_grad_norm_(-1), "max_norm is -1: give a number of at least 0"),
    (lambda: parallelized().parameter_groups("0.1"), "weight_decay is '0.1': give a number"),
    (lambda: parallelized().step([], 1.0), "the optimizer is a list: give one; with several"),
    (lambda: plait.save(parallelized(), None, TINY, [1]), "the state to be saved is an object of list"),  # type: ignore[arg-type]
    (lambda: plait.load(parallelized(), 3, TINY), "the optimizer is an object of int: give one of"),  # type: ignore[arg-type]
    (
        lambda: plait.load(parallelized(), None, TINY, options="new"),
        "options is 'new': choose one of saved, given",
    ),  # type: ignore[arg-type]
]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except PlaitError as error:
        return str(error)
    return "it was taken"


def test_invalid_arguments_of_public_functions_are_refused_by_name() -> None:
    told = [(message, refusal(call)) for call, message in REFUSED]
    assert not [(message, text) for message, text in told if message not in text]


def test_numpy_numbers_are_accepted_as_numbers() -> None:
    assert plait.launch(int, ranks=np.int64(2), threads=np.int32(1), ranks_as="threads") == [0, 0]
    result = fit(steps=np.int64(2), seed=np.uint8(3), learning_rate=np.float32(0.1))
    assert isinstance(result, FitResult)
    assert (result.steps, type(result.steps)) == (2, int)
