"""Comparison with a model that plait did not make: what it finds, where, and that it is no false alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.pairs import in_quick
from plait.errors import DataError, ModelError, PlanError
from plait.models.huggingface import families as decoder
from plait.models.huggingface.pretrained import logits_of
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.experts.router import Router
from plait.verification.case import Case
from plait.verification.independent_comparison import compare, compare_with_reference
from plait.verification.independent_model_report import Compared, IndependentReport, report_of_all
from plait.verification.independent_reference import (
    FACTOR,
    PART_OF_LARGEST,
    PERTURBED_RUNS,
    Expected,
    Float64Mode,
    IndependentReference,
)
from plait.verification.options import VerifyOptions
from unit.verification.verification_cases import mlp, rows_and_classes
from zoo.forward import micro_batches_interleaved

ONE = Plan(microbatches=2)


def beside(
    model: Any,
    reference: Any,
    plan: Plan = ONE,
    batch: Any = None,
    thread_ranks: RankPool | None = None,
    loss: Any = plait.cross_entropy,
    **options: Any,
) -> IndependentReport:
    """What `plait.verify` says with a reference, in this process or on ranks that are there."""
    batch = rows_and_classes() if batch is None else batch
    case = Case(model, loss, [batch], VerifyOptions(steps=1), device="cpu", timeout=60.0)
    given = IndependentReference(lambda: reference, **options)
    if thread_ranks is None:
        outcomes = [compare_with_reference(case, plan, given)]
    else:
        outcomes = thread_ranks.run(compare_with_reference, case, plan, given, ranks=plan.world)
    return report_of_all(outcomes)


def contexts(rows: int = 4) -> tuple[Tensor, Tensor]:
    return cases.draw_contexts(cases.GPT2_VOCAB)(rows, torch.Generator().manual_seed(3))


PLANS = {
    "one": ONE,
    "pp tp": Plan(pp=2, tp=2, schedule="zb-h1", microbatches=2),
    "dp": Plan(dp=2, strategy="full", reduce="each", recompute="full"),
    "cp tp": Plan(cp=2, tp=2, sequence_parallel="keep", microbatches=2),
}


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("name", "plan"),
    in_quick([(name, plan) for name in cases.MODELS for plan in PLANS], ("gemma2", "one")),
)
def test_every_family_is_equal_to_transformers(thread_ranks: RankPool, name: str, plan: str) -> None:
    model = cases.MODELS[name]()
    report = beside(plait.models.from_huggingface(model), model, PLANS[plan], contexts(), thread_ranks)
    assert report, report
    assert report.unmatched == 0
    assert max(one.largest / one.size for one in report.compared_tensors) < 1e-13


@pytest.mark.transformers
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["one", "pp tp"])
def test_balance_losses_of_routers_are_left_out_beside_a_reference(thread_ranks: RankPool, plan: str) -> None:
    model = cases.mixtral(output_router_logits=True, router_aux_loss_coef=0.5)
    layers = plait.models.from_huggingface(model)
    report = beside(layers, model, PLANS[plan], contexts(), thread_ranks)
    assert report, report
    assert {one.balance.weight for one in layers.modules() if isinstance(one, Router)} == {0.5}


def a_window_everywhere() -> Any:
    """The window of the configuration counts for a class that ignores it."""
    return patch.object(decoder, "_windows", lambda config, _, count: [config.sliding_window] * count)


def a_cap_everywhere() -> Any:
    """The cap of the configuration counts for a class that ignores it."""
    original = decoder.Head

    def capped(*given: Any, cap: float | None, **options: Any) -> Any:
        return original(*given, cap=0.5, **options)

    return patch.object(decoder, "Head", capped)


def the_switch_counts() -> Any:
    """SmolLM 3's use_sliding_window switches off the windows of layer_types."""
    return patch.object(decoder, "_windows", lambda config, _, count: [None] * count)


TYPES = ["sliding_attention", "full_attention"]
BEFORE = "on one rank model.layers.0.self_attn.o_proj is given something else, where"


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("make", "mistake", "place"),
    [
        (partial(cases.llama, sliding_window=3), a_window_everywhere, BEFORE),
        pytest.param(
            *(partial(cases.olmo2, sliding_window=3), a_window_everywhere, BEFORE), marks=pytest.mark.full
        ),
        pytest.param(
            partial(cases.olmo2, final_logit_softcapping=0.5),
            a_cap_everywhere,
            "on one rank all modules that both have give the same: look at what follows lm_head.",
            marks=pytest.mark.full,
        ),
        pytest.param(
            partial(cases.smollm3, sliding_window=3, layer_types=TYPES, use_sliding_window=False),
            the_switch_counts,
            BEFORE,
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_model_that_differs_from_transformers_is_found(
    make: Any, mistake: Callable[[], Any], place: str
) -> None:
    model = make()
    with mistake():
        report = beside(plait.models.from_huggingface(model), model, batch=contexts())
    assert report.first is not None
    assert report.first.what == "output"
    assert report.place.startswith(place), report
    report = beside(plait.models.from_huggingface(model), model, batch=contexts())
    assert report, report


def plain(model: nn.Module, inputs: Tensor, slope: float = 1.0) -> Tensor:
    """`mlp` written down."""
    first, norm, _, last = (copy.deepcopy(one).double() for one in model)  # type: ignore[arg-type]
    hidden = functional.layer_norm(functional.linear(inputs, first.weight, first.bias), (8,), norm.weight)
    return functional.linear(functional.gelu(hidden + norm.bias) * slope, last.weight, last.bias)


def test_a_function_of_the_inputs_is_compared_by_outputs_and_input_gradients(
    thread_ranks: RankPool,
) -> None:
    model = mlp()
    plan = Plan(pp=2, dp=2, microbatches=2)
    calls: list[Tensor] = []

    def counted(inputs: Tensor) -> Tensor:
        calls.append(inputs)
        return plain(model, inputs)

    report = beside(model, counted, plan, rows_and_classes(8), thread_ranks)
    assert report, report
    assert len(calls) == 1 + PERTURBED_RUNS
    assert not any(torch.equal(calls[0], other) for other in calls[1:])
    assert [one.what for one in report.compared_tensors].count("input gradient") == 2
    assert report.unmatched == 6
    report = beside(model, partial(plain, model, slope=1 + 1e-8), plan, rows_and_classes(8), thread_ranks)
    assert report.first is not None
    assert "NOT EQUAL to the reference: the output differs by" in str(report)


class Detached(nn.Sequential):
    """`mlp` whose first two layers the loss does not reach."""

    def forward(self, inputs: Tensor) -> Tensor:
        first, norm, act, last = self
        result: Tensor = last(act(norm(first(inputs)).detach()))
        return result


class Behind(nn.Sequential):
    """`mlp` whose output is squared after its last module."""

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = super().forward(inputs)
        return result.square()


class Between(nn.Sequential):
    """`mlp` that scales what its last module is given."""

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self[3](2 * self[2](self[1](self[0](inputs))))
        return result


class OtherShape(nn.Sequential):
    """`Between`, whose second module is given a batch of one batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self[3](2 * self[2](self[1](self[0](inputs)[None])[0]))
        return result


@pytest.mark.parametrize(
    "change",
    ["gradient", "initial values", "output", "behind all modules", "between modules", "other shape"],
)
def test_the_first_difference_is_named(change: str) -> None:
    model: Any = mlp()
    reference: Any = copy.deepcopy(model)
    if change == "gradient":
        reference = Detached(*reference)
    elif change == "initial values":
        reference[3].bias.data.add_(0.5)
    elif change == "output":
        reference[1].eps = 1e-3
    else:
        changed = {"behind all modules": Behind, "between modules": Between, "other shape": OtherShape}
        reference = changed[change](*reference)
    report = beside(model, reference)
    assert report.first is not None
    change_of = change if change in ("gradient", "initial values") else "output"
    assert report.first.what == change_of
    text = {
        "gradient": "the gradient of 1.bias differs",
        "initial values": "the initial values of 3.bias differs",
        "output": "1 gives something else for the same input",
        "behind all modules": "all modules that both have give the same: look at what follows 3.",
        "between modules": "on one rank 3 is given something else, where 0 and 1 give the same: look at",
        "other shape": "on one rank 3 is given something else, where 0 give the same: look at",
    }
    assert text[change] in " ".join(str(report).split())
    told = report.as_json()
    assert (told["equal"], told["first"]["what"], told["against"]) == (False, change_of, "the reference")
    assert told["first"]["batch"] == 0
    phases = ["initial values"] if change == "initial values" else []
    assert list(told["phases"]) == [*phases, "output", "loss", "gradient", "input gradient"]


def test_a_mistake_of_the_plan_is_told_from_one_of_the_model() -> None:
    with micro_batches_interleaved():
        report = beside(mlp(), mlp())
    assert report.place.startswith("plait's layers on one rank give what the reference gives, so the plan")


@pytest.mark.transformers
def test_linears_are_not_in_float8_beside_a_reference_which_knows_nothing_of_it() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    report = beside(model, copy.deepcopy(model), replace(ONE, linears="float8"))
    assert report, report
    assert max(one.largest / one.size for one in report.compared_tensors) < 1e-13


def test_packed_documents_are_each_a_sequence_of_the_reference() -> None:
    model = cases.mistral()
    tokens, targets = contexts(2)
    ids = torch.tensor([[0] * 3 + [1] * 5, [2] * 8])
    packed = {"tokens": tokens, "document_ids": ids}
    report = beside(plait.models.from_huggingface(model), model, batch=(packed, targets), call=logits_of)
    assert report, report


@pytest.mark.transformers
def test_a_model_on_meta_gives_its_values_to_the_reference() -> None:
    with torch.device("meta"):
        layers = plait.models.from_huggingface(cases.qwen2())
    assert beside(layers, cases.qwen2(), batch=contexts(2))


def test_an_unusable_reference_is_refused_on_every_rank(thread_ranks: RankPool) -> None:
    with pytest.raises(ModelError, match="the reference fails on a single device, ValueError: no"):
        beside(mlp(), failing, Plan(dp=2), thread_ranks=thread_ranks)
    with pytest.raises(
        DataError, match=r"the output has the shape \[4, 5\], and that of the reference \[4, 6\]"
    ):
        beside(mlp(), lambda inputs: functional.pad(plain(mlp(), inputs), (0, 1)))
    with pytest.raises(DataError, match="the model gives 1 tensors, and the reference 2: give one"):
        beside(
            mlp(),
            lambda inputs: (plain(mlp(), inputs), inputs),
            loss=plait.tensor.mean_loss(loss_of_one, over="rows"),
        )
    with pytest.raises(ModelError, match="the loss of the reference is nan: nothing compares with it"):
        beside(mlp(), lambda inputs: plain(mlp(), inputs) * torch.nan)
    inputs, targets = rows_and_classes()
    for given, reason in (
        ({"reference": 5}, "the reference is 5: give an nn.Module"),
        ({"reference": mlp(), "mode": "exact"}, "mode = 'exact' does not go with a reference"),
        ({"reference": mlp(), "clip": 1.0}, "clip = 1.0 does not go with a reference"),
    ):
        with pytest.raises(PlanError, match=reason):
            plait.verify(mlp(), ONE, inputs, targets, **given)  # type: ignore[arg-type]


def loss_of_one(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output if isinstance(output, Tensor) else output[0], targets)


def failing(inputs: Tensor) -> Tensor:
    raise ValueError("no")


def test_verify_compares_with_a_given_reference() -> None:
    report = plait.verify(mlp(), ONE, *rows_and_classes(), reference=mlp(), ranks_as="threads", threads=1)
    assert report.equal
    assert report.as_json()["compared"] == 9


def test_casts_to_narrower_formats_keep_float64() -> None:
    wide = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with Float64Mode() as mode:
        casts = (wide.float(), wide.to(torch.bfloat16), wide.to(dtype=torch.float32), wide.half())
        assert all(one.dtype is torch.float64 for one in casts)
        assert functional.softmax(wide, dim=0, dtype=torch.float32).dtype is torch.float64
        assert torch.arange(3).float().dtype is torch.float32
        assert not mode.narrow
        assert wide.type_as(torch.zeros(1)).dtype is torch.float32
        assert mode.narrow


NAN = float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "size", "found"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [5.0, -8.0]], 0.0, (12.0, 8.0, (1, 1), (4.0, -8.0))),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.5], [3.0, 4.0]], 9.0, (0.5, 9.0, (0, 1), (2.0, 2.5))),
        ([1.0, NAN], [1.0, NAN], 3.0, (0.0, 3.0, (0,), (1.0, 1.0))),
        ([], [], 0.0, (0.0, 0.0, (), (0.0, 0.0))),
        (2.0, -1.0, 0.0, (3.0, 1.0, (), (2.0, -1.0))),
    ],
)
def test_comparing_two_tensors_gives_the_largest_difference_and_its_place(
    actual: Any, expected: Any, size: float, found: Any
) -> None:
    one = compare(1, "output", "a", torch.tensor(actual), torch.tensor(expected), 0.25, size)
    largest, known, index, values = found
    if actual == expected == [1.0, NAN]:
        known = one.size
    assert one == Compared(1, "output", "a", largest, known, 0.25, index, values)
    assert one.equal is (largest <= 0.25)


def test_one_nan_is_an_infinite_difference_and_another_shape_is_refused() -> None:
    one = compare(0, "loss", "", torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), 1e9)
    assert (one.largest, one.index, one.equal) == (float("inf"), (1,), False)
    with pytest.raises(
        DataError, match=r"^the output of a has the shape \[2\], and that of the reference \[1\]:"
    ):
        compare(0, "output", "a", torch.ones(2), torch.ones(1), 0.0)


def test_a_tensor_of_the_reference_may_differ_by_a_multiple_of_its_deviation() -> None:
    gradients = {"a": torch.tensor([-8.0, 1.0]), "b": torch.tensor([2.0]), "none": torch.empty(0)}
    expected = Expected([torch.ones(1)], torch.tensor(1.0), gradients, [torch.ones(2)], {"loss": 0.5}, 0.125)
    assert [name for name, _ in expected.named()] == [
        *("output 0", "input gradient 0", "loss", "gradient a", "gradient b", "gradient none")
    ]
    assert expected.allowed("loss", 2.0) == FACTOR * 0.5
    assert expected.allowed("loss", 16.0) == expected.allowed("output 0", 16.0) == FACTOR * 2.0
    assert replace(expected, accuracy=FACTOR).allowed("loss", 2.0) == FACTOR * 2.0
    assert expected.smallest_size() == PART_OF_LARGEST * 8.0


def test_the_report_combines_the_comparisons_of_all_ranks() -> None:
    def one(batch: int, what: str, name: str = "", off: float = 0.0) -> Compared:
        return Compared(batch, what, name, off, 2.0, 0.25, (3,), (1.0 + off, 1.0))

    def report_of(*compared: Compared, unmatched: int, place: str, seconds: float) -> IndependentReport:
        return IndependentReport("the reference", ONE, compared, unmatched, place, seconds)

    found = one(1, "loss"), one(0, "gradient", "a"), one(0, "loss")
    ranks = [
        report_of(*found, unmatched=2, place="a place", seconds=1.5),
        report_of(one(0, "output", off=0.125), one(1, "output"), unmatched=7, place="another", seconds=2.5),
    ]
    report = report_of_all(ranks)
    order = [(each.batch, each.what) for each in report.compared_tensors]
    assert order == [(0, "output"), (0, "loss"), (0, "gradient"), (1, "output"), (1, "loss")]
    assert (report.unmatched, report.place, report.seconds) == (2, "a place", 2.5)
    assert report
    assert str(report).startswith(
        "EQUAL to the reference: 5 tensors differ by at most 6.2e-02 of their size."
    )
    compared = one(0, "loss", off=1.0), one(0, "gradient", "b", off=2.0)
    report = report_of_all([ranks[0], replace(ranks[1], compared_tensors=compared)])
    text = " ".join(str(report).split())
    assert "NOT EQUAL to the reference: the loss differs by 5.0e-01 of its size." in text
    assert "first batch 1, the loss where worst at [3]: 2 instead of 1" in text
    assert "likely the outputs are equal, and the loss of them is not. in all 2 of 5 tensors differ" in text
    assert "without the gradients of 2 parameters, which" in text
    phases = report.as_json()["phases"]
    assert phases["loss"] == {"compared": 3, "different": 1, "largest": 0.5}
    assert phases["gradient"] == {"compared": 2, "different": 1, "largest": 1.0}
