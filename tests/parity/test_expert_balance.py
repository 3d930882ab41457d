"""Auxiliary losses of routers, loads of experts and corrections of biases are those of one device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity.balanced import ROWS, Outcome, batch, build, document_ids, expected, run
from parity.norm import assert_equal
from parity.pairs import covering_rows, in_quick
from plait.errors import ModelError, PlanError
from plait.plan.plan import Plan
from plait.tensor.experts.balance import Balance

TOLERANCE = 1e-12
SETTINGS = {
    "document": Balance(0.5, 0.01, counts="document"),
    "step": Balance(0.5, 0.01, counts="step"),
    "previous": Balance(0.5, 0.01, counts="previous"),
    "coupled document": Balance(0.5, counts="document", coupled=True),
    "coupled step": Balance(0.5, 0.01, counts="step", coupled=True),
    "coupled previous": Balance(0.5, counts="previous", coupled=True),
    "z-loss alone": Balance(z_weight=0.05),
    "corrected": Balance(0.2, bias_rate=0.05),
    "corrected alone": Balance(bias_rate=0.05),
}
reference = lru_cache(expected)


def compare(found: Outcome, balance: Balance, packed: bool) -> None:
    """All steps of a run with plain PyTorch's."""
    plain = reference(balance, packed)
    for step, gradients in enumerate(plain.gradients):
        assert_equal(found.gradients[step], gradients, TOLERANCE, f"gradients of step {step}")
        for one, other in ((found.tokens, plain.tokens), (found.biases, plain.biases)):
            assert one[step].keys() == other[step].keys()
            assert all(torch.equal(one[step][name], value) for name, value in other[step].items())
        assert_equal(found.losses[step], plain.losses[step], TOLERANCE, f"losses of step {step}")


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_of_one_rank_are_those_of_plain_pytorch(thread_ranks: Any, name: str, packed: bool) -> None:
    plan = Plan(microbatches=2, schedule="gpipe")
    (found,) = thread_ranks.run(run, plan, SETTINGS[name], packed, ranks=1)
    compare(found, SETTINGS[name], packed)


PIPELINES: dict[str, dict[str, Any]] = {
    "one stage": {},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
    "interleaved": {"pp": 2, "schedule": "interleaved"},
}
DATA: dict[str, dict[str, Any]] = {
    "one": {},
    "none": {"dp": 2},
    "optimizer": {"dp": 2, "strategy": "optimizer"},
    "gradients": {"dp": 2, "strategy": "gradients", "reduce": "each"},
    "full": {"dp": 2, "strategy": "full"},
    "replicate": {"dp": 4, "replicate": 2, "strategy": "full"},
}
TENSOR: dict[str, dict[str, Any]] = {
    "one": {},
    "whole": {"tp": 2},
    "in parts": {"tp": 2, "sequence_parallel": "keep"},
}


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan of a row, or of the beginning of one."""
    tables = {"pipeline": PIPELINES, "data": DATA, "tensor": TENSOR}
    options = {"cp": 1, "ep": 1, "etp": 1, "microbatches": 1, "recompute": "none", "compile": False}
    fields = {
        name: value
        for factor, table in tables.items()
        for name, value in table[row.get(factor, next(iter(table)))].items()
    }
    return Plan(
        **fields, **{name: row.get(name, default) for name, default in options.items()}, precision="fp64"
    )


def allowed(row: dict[str, Any]) -> bool:
    """Not what is refused, and at most eight ranks."""
    try:
        plan, balance = plan_of(row), SETTINGS[row.get("name", "document")]
    except PlanError:  # ep and etp divide ranks that later factors may give
        return not {"data", "cp", "tensor"} <= row.keys()
    early = plan.schedule not in ("gpipe",) and plan.microbatches > 1
    return (
        plan.world <= 8
        and not (balance.counts == "step" and balance.weight and early)
        and not (balance.counts == "document" and balance.coupled and plan.pp > 1)
    )


FACTORS: dict[str, list[Any]] = {
    "name": list(SETTINGS),
    "packed": [False, True],
    "pipeline": list(PIPELINES),
    "data": list(DATA),
    "cp": [1, 2],
    "tensor": list(TENSOR),
    "ep": [1, 2],
    "etp": [1, 2],
    "microbatches": [1, 2],
    "recompute": ["none", "selective", "full"],
    "compile": [False, "graphs"],
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=str)
def test_balance_of_any_plan_equals_one_device(thread_ranks: Any, row: dict[str, Any]) -> None:
    plan, balance = plan_of(row), SETTINGS[row["name"]]
    for found in thread_ranks.run(run, plan, balance, row["packed"], ranks=plan.world):
        compare(found, balance, row["packed"])


def two_halves(plan: Plan, balance: Balance, folder: Path | None, half: int) -> list[Tensor]:
    """Train a half of four steps; the second goes on from a checkpoint. Returns all weights and biases."""
    engine = plait.parallelize(build(balance), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    if half == 1 and folder is not None:
        plait.load(engine, optimizer, folder)
    for step in range(4) if folder is None else range(2 * half, 2 * half + 2):
        tokens, targets = batch(step, None)
        rows = slice(*(ROWS // plan.dp * (engine.mesh.index("dp") + end) for end in (0, 1)))
        optimizer.zero_grad()
        engine.forward_backward(tokens[rows], targets[rows])
        engine.step(optimizer, 1.0)
    if half == 0 and folder is not None:
        plait.save(engine, optimizer, folder)
    return list(engine.state_dict(everywhere=True).values())


def test_biases_and_counts_of_the_step_before_are_in_checkpoints(thread_ranks: Any, tmp_path: Path) -> None:
    balance = Balance(0.5, counts="previous", bias_rate=0.05)
    plan = Plan(pp=2, microbatches=2, precision="fp64")
    expected = thread_ranks.run(two_halves, plan, balance, None, 0, ranks=2)[0]
    thread_ranks.run(two_halves, plan, balance, tmp_path / "saved", 0, ranks=2)
    found = thread_ranks.run(two_halves, plan, balance, tmp_path / "saved", 1, ranks=2)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def accumulated(balance: Balance, calls: int, scale: float | None) -> tuple[list[Tensor], Tensor]:
    """Gradients and biases of the same batch in one call of `forward_backward`, or as halves in two."""
    plan = Plan(microbatches=2, precision="fp64", loss_scale=scale)
    engine = plait.parallelize(build(balance), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.0)
    tokens, targets = batch(0, None)
    targets = targets.clamp(min=0)  # halves of equal weight
    for half in range(calls):
        rows = slice(ROWS // calls * half, ROWS // calls * (half + 1))
        engine.forward_backward(tokens[rows], targets[rows])
    gradients = [one / calls for _, one in engine.named_gradients()]
    optimizer.step()
    optimizer.step()  # corrects nothing: there were no choices in between
    return gradients, torch.stack([one.clone() for _, one in engine.named_buffers()])


def test_gradients_and_corrections_of_two_calls_add_up_under_a_loss_scale(thread_ranks: Any) -> None:
    balance = Balance(0.5, 0.1, bias_rate=0.05)
    (once,) = thread_ranks.run(accumulated, balance, 1, None, ranks=1)
    (twice,) = thread_ranks.run(accumulated, balance, 2, 1024.0, ranks=1)
    assert torch.equal(once[1], twice[1])
    for one, other in zip(once[0], twice[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def overflowing() -> tuple[Tensor, Tensor]:
    plan = Plan(precision="fp16")
    engine = plait.parallelize(
        build(Balance(bias_rate=0.05)), plan, plait.Mesh(plan), loss=plait.cross_entropy
    )
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    (before, *_) = [one.clone() for _, one in engine.named_buffers()]
    engine._runner.scale.value = 2.0**60
    engine.forward_backward(*batch(0, None))
    engine.step(optimizer, 1.0)
    (after, *_) = [one.clone() for _, one in engine.named_buffers()]
    return before, after


def test_a_step_whose_gradients_overflow_corrects_no_bias(thread_ranks: Any) -> None:
    ((before, after),) = thread_ranks.run(overflowing, ranks=1)
    assert before.dtype == torch.float32
    assert torch.equal(before, after)


def refused(plan: Plan, balance: Balance) -> str:
    with pytest.raises((PlanError, ModelError)) as error:
        plait.parallelize(build(balance), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    return str(error.value)


@pytest.mark.parametrize(
    ("plan", "balance", "words"),
    [
        (Plan(pp=2, microbatches=2), Balance(0.1, counts="step"), "schedule 1f1b"),
        (Plan(microbatches=2), Balance(0.1, counts="step"), "schedule 1f1b"),
        (Plan(pp=2), Balance(0.1, coupled=True), "no rank sees whole"),
    ],
)
def test_counts_that_come_too_late_are_refused(
    thread_ranks: Any, plan: Plan, balance: Balance, words: str
) -> None:
    assert all(words in one for one in thread_ranks.run(refused, plan, balance, ranks=plan.world))


VERIFIED = {
    "document": ({"pp": 2, "dp": 2, "microbatches": 2}, Balance(0.5, 0.1)),
    "coupled step": (
        {"tp": 2, "dp": 2, "ep": 2, "microbatches": 2, "schedule": "gpipe"},
        SETTINGS["coupled step"],
    ),
    "previous": ({"dp": 2, "strategy": "full", "microbatches": 2}, SETTINGS["previous"]),
    "corrected": ({"cp": 2, "pp": 2, "microbatches": 2}, SETTINGS["corrected"]),
}


@pytest.mark.parametrize("name", in_quick(VERIFIED, "previous"))
def test_verify_computes_the_losses_of_routers_and_finds_them_equal(name: str) -> None:
    options, balance = VERIFIED[name]
    ids = document_ids(name == "document")
    tokens, targets = batch(0, ids)
    inputs = tokens if ids is None else {"tokens": tokens, "document_ids": ids}
    report = plait.verify(build(balance).float(), Plan(**options), inputs, targets, ranks_as="threads")
    assert report.equal, report
