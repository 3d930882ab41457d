"""Steps whose segments are recorded and replayed train as one rank: every gradient, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.case import Case, Recipe
from parity.cases import GPT2_VOCAB, USER_CASES, case, gpt2, llama
from parity.contexts import packed
from parity.data import draw_vectors
from parity.dropping import DROPPING, by_hand
from parity.layers import CLASSES, HIDDEN
from parity.pairs import a_third_compiled, covering_rows, every_row
from parity.parity import compare
from parity.recorded_steps import (
    FIVE_STEPS,
    check_replayed,
    graphs_of,
    have_same_gradients,
    recording_engine,
    train,
)
from parity.rows import name_of, plan_of
from parity.woven import layer_count
from plait.engine.pipeline import stage
from plait.engine.pipeline.loss_stage import OverwritingLossStage
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import schedule
from plait.tensor import losses
from plait.tensor.microbatches import Microbatches
from plait.tensor.torch_losses import as_loss

CASE = gpt2(layers=2, tied=False)
QUICK = ("in_place", "tuples", "crossing_ties", "buffers")
"""Of the users' models; the full run has all."""
FACTORS = {
    "schedule": ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "v-min"),
    "model": ((1, 1), (2, 1), (4, 1)),
    "data": ((1, 1), (2, 1), (2, 2)),
    "tied": (True, False),
    "microbatches": (1, 2, 4, 5),
    "strategy": ("none", "optimizer", "gradients", "full"),
    "reduce": ("last", "each"),
    "recompute": ("none", "selective", "full"),
    "compile": (False, "graphs"),
}
"""`model`: pp and tp; `data`: dp and replicate."""


def allowed(row: dict[str, Any]) -> bool:
    (pp, tp), (dp, _) = row.get("model", (1, 1)), row.get("data", (1, 1))
    return pp * tp * dp <= 4


def differs(row: dict[str, Any]) -> bool:
    """Whether a strategy that keeps whole gradients would not reduce them as late as it does."""
    return row["reduce"] == "last" or row["strategy"] in ("gradients", "full")


EVERYTHING = {
    **FACTORS,
    "model": ((2, 1),),
    "data": ((2, 1),),
    "tied": (True,),
    "microbatches": (4,),
    "compile": (False,),
}
"""All schedules, strategies and ways to recompute, on two stages of two ranks."""


def check_row(thread_ranks: Any, row: dict[str, Any]) -> None:
    """Compare a row with one rank; all but the first steps must have run in graphs."""
    given = {name: value for name, value in row.items() if name != "tied"}
    plan = plan_of({**given, "cuda_graphs": True})
    for counts in check_replayed(thread_ranks, gpt2(layers=3, tied=row["tied"]), plan):
        assert counts.replayed >= 2 * counts.recorded > 0
        assert set(counts.eager) == {"the first steps of a shape"}


@pytest.mark.full
@pytest.mark.parametrize("row", a_third_compiled(filter(differs, every_row(EVERYTHING))), ids=name_of)
def test_replayed_segments_train_as_one_rank_for_every_row_of_the_product(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_row(thread_ranks, row)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_replayed_segments_train_as_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    check_row(thread_ranks, row)


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "schedule": "zb-h1", "loss_rows": 5},
        {"dp": 2, "strategy": "full", "reduce": "each", "loss_rows": 3, "recompute": "full"},
        {"dp": 2, "strategy": "full", "offload": "full"},
        {"dp": 2, "strategy": "optimizer", "offload": "parameters", "compile": "graphs"},
        {"pp": 2, "schedule": "1f1b", "overlap": True},
    ],
    ids=str,
)
def test_replayed_segments_compute_losses_in_chunks_and_offload(
    thread_ranks: Any, settings: dict[str, Any]
) -> None:
    plan = Plan(**settings, microbatches=4, precision="fp64", cuda_graphs=True)
    with patch.object(losses, "is_accelerator", lambda _: True):  # a GPU's targets are not read on the host
        every = check_replayed(thread_ranks, gpt2(layers=1, tied=False), plan)
    for counts in every:
        assert counts.replayed >= 2 * counts.recorded > 0


@pytest.mark.parametrize(
    "settings",
    [{"pp": 2, "schedule": "zb-v"}, {"dp": 2, "strategy": "gradients", "reduce": "each"}],
    ids=str,
)
def test_replayed_segments_add_to_the_gradients_of_earlier_calls(
    thread_ranks: Any, settings: dict[str, Any]
) -> None:
    plan = Plan(**settings, microbatches=3, precision="fp64", cuda_graphs=True)
    recipe = Recipe(steps=3, calls=2, set_to_none=False)
    check_replayed(thread_ranks, gpt2(layers=1, tied=True), plan, recipe)


@pytest.mark.parametrize("completion", ["late", pytest.param(1, marks=pytest.mark.full)])
def test_replayed_segments_train_as_one_rank_under_nccl_stream_rules(
    thread_ranks: Any, completion: Any
) -> None:
    plan = plan_of(
        {"model": (2, 1), "data": (2, 1), "schedule": "zb-v", "strategy": "full", "microbatches": 5},
        cuda_graphs=True,
    )
    check_replayed(thread_ranks.under_rules(completion), gpt2(layers=1, tied=True), plan)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.full)
        for one in USER_CASES
    ],
)
@pytest.mark.parametrize("pp", [1, 2])
def test_replayed_segments_train_users_models_as_one_rank(thread_ranks: Any, case: Case, pp: int) -> None:
    if layer_count(case) < pp:
        pytest.skip("fewer layers than stages")
    plan = Plan(pp=pp, microbatches=3, precision="fp64", recompute="selective", cuda_graphs=True)
    check_replayed(thread_ranks, case, plan)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "full"},
        {"pp": 2, "schedule": "zb-v", "compile": "graphs"},
        {"pp": 2, "dp": 2, "strategy": "full", "reduce": "each", "recompute": "full"},
        {"dp": 2, "compile": "graphs", "recompute": "selective"},
    ],
    ids=str,
)
def test_replayed_segments_drop_by_the_masks_of_their_step_and_rows(
    thread_ranks: Any, settings: dict[str, Any]
) -> None:
    plan = Plan(**settings, microbatches=4, precision="fp64", cuda_graphs=True)
    results = thread_ranks.run(train, DROPPING, plan, FIVE_STEPS, ranks=plan.world)
    compare([one for one, _ in results], by_hand(DROPPING, plan, FIVE_STEPS), torch.float64)
    assert all(counts.replayed > counts.recorded > 0 for _, counts in results)


def test_replayed_segments_multiply_by_the_loss_scale_of_their_step(thread_ranks: Any) -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    plain, recorded = woven.weave(CASE, replace(plan, cuda_graphs=False)), recording_engine(CASE, plan)
    for step, batch in enumerate(woven.shares(CASE, plain, 6)):
        recorded._runner.scale.value = 2.0**step
        for engine in (plain, recorded):
            engine.forward_backward(*batch)
        assert have_same_gradients(plain, recorded)
        for engine in (plain, recorded):
            for parameter in engine.parameters():
                parameter.grad = None
    assert graphs_of(recorded).counts.replayed > 0


def test_a_replayed_step_calls_no_layer_no_loss_and_no_backward() -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    engine = recording_engine(DROPPING, plan)
    batches = woven.shares(DROPPING, engine, 4)
    for batch in batches[:3]:
        engine.forward_backward(*batch)

    def called(*_: Any, **__: Any) -> Any:
        raise AssertionError("a replayed step runs Python code of the model")

    for module in engine._runner.modules:
        for one in module.modules():
            one.forward = called  # type: ignore[method-assign]
            for name, value in vars(one).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    setattr(one, name, math.nan)
    with (
        patch.object(OverwritingLossStage, "compute", called),
        patch.object(stage, "run_backward", called),
    ):
        loss = engine.forward_backward(*batches[3])
    assert loss.isfinite()


def rows_of_lengths(lengths: Sequence[int]) -> tuple[Microbatches, Microbatches]:
    """A batch of micro-batches of one row of these lengths."""
    drawn = [torch.arange(3, 4 + length)[None] % GPT2_VOCAB for length in lengths]
    return Microbatches(one[:, :-1] for one in drawn), Microbatches(one[:, 1:] for one in drawn)


def test_each_shape_has_graphs_of_its_own_up_to_a_number() -> None:
    plan = Plan(microbatches=3, precision="fp64", cuda_graphs=True)
    plain = woven.weave(CASE, replace(plan, cuda_graphs=False))
    recorded = recording_engine(CASE, plan, most=6)
    for lengths in ([4, 4, 4], [4, 6, 4], [4, 6, 4], [4, 6, 4], [4, 6, 5], [4, 6, 5], [4, 6, 5]):
        batch = rows_of_lengths(lengths)
        losses = [engine.forward_backward(*batch) for engine in (plain, recorded)]
        assert torch.equal(*losses)
    assert have_same_gradients(plain, recorded)
    counts = graphs_of(recorded).counts
    assert counts.recorded == 6  # three of each of the first two shapes
    assert counts.eager["more than 6 graphs"] == 3


class Reading(nn.Module):
    """A layer that reads a value of its input on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * (2.0 if hidden.is_meta or hidden.abs().max().item() > 0 else 1.0)


class Listing(nn.Module):
    """A layer that reads whole numbers on the host, as divided experts do: how many tokens each gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.is_meta:
            return self.linear(hidden)
        first = int(sum((hidden[:, 0] > 0).tolist()))
        order = hidden[:, 0].argsort()
        return self.linear(torch.cat([hidden[order][:first], hidden[order][first:]]))


class Drawing(nn.Module):
    """A layer that draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + torch.rand(hidden.shape, dtype=hidden.dtype) * 0


@pytest.mark.parametrize(
    ("make", "recompute", "why"),
    [
        (Reading, "none", "layers '0' to '1': the host reads the result of aten._local_scalar_dense"),
        (Listing, "none", "layers '0' to '1': the host reads the result of Tensor.tolist"),
        (Drawing, "full", "layers '0' to '1': aten.rand would draw anew when it is recomputed"),
        (Drawing, "none", ""),
        (
            partial(plait.MixtureOfExperts, HIDDEN, 8, 4, 2),
            "none",
            "layer '0' has a router, whose choices are counted in Python",
        ),
    ],
)
def test_layers_that_no_graph_can_hold_run_eagerly_by_name(make: Any, recompute: Any, why: str) -> None:
    plan = Plan(microbatches=2, precision="fp64", recompute=recompute, cuda_graphs=True)
    one = case(lambda: nn.Sequential(make(), nn.Linear(HIDDEN, CLASSES)), draw_vectors)
    engine = recording_engine(one, plan)
    for batch in woven.shares(one, engine, 4):
        engine.forward_backward(*batch)
    counts = graphs_of(engine).counts
    assert bool(counts.recorded) == (not why)
    assert set(counts.eager) - {"the first steps of a shape"} == {why} - {""}


class Counting(nn.Module):
    """A layer that counts its runs in a buffer, which plait sets back in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.runs += self.training
        return self.linear(hidden)


@pytest.mark.parametrize(
    ("one", "settings", "why"),
    [
        (
            packed(llama(layers=1), 8),
            {},
            "documents, or a part of the sequence: the host reads where they begin",
        ),
        (llama(layers=1), {"tp": 2}, "layers communicate over tp, cp, ep or etp"),
        (llama(layers=1), {"cp": 2}, "layers communicate over tp, cp, ep or etp"),
        (case(lambda: nn.Sequential(Counting()), draw_vectors), {}, "layer '0' counts its runs in Python"),
    ],
    ids=["documents", "tp", "cp", "counting"],
)
def test_plans_and_layers_that_cannot_be_recorded_train_eagerly_and_say_why(
    thread_ranks: Any, one: Case, settings: dict[str, Any], why: str
) -> None:
    plan = Plan(**settings, microbatches=2, precision="fp64", cuda_graphs=True)
    for outcome, counts in thread_ranks.run(train, one, plan, FIVE_STEPS, ranks=plan.world):
        assert all(map(math.isfinite, outcome.losses))
        assert (counts.recorded, set(counts.eager)) == (0, {why})


def test_a_step_that_fails_while_it_is_recorded_is_recorded_again() -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    plain, recorded = woven.weave(CASE, replace(plan, cuda_graphs=False)), recording_engine(CASE, plan)
    for number, batch in enumerate(woven.shares(CASE, plain, 5)):
        if number == 2:
            with (
                patch.object(OverwritingLossStage, "seed", side_effect=ZeroDivisionError),
                pytest.raises(ZeroDivisionError),
            ):
                recorded.forward_backward(*batch)
        assert torch.equal(plain.forward_backward(*batch), recorded.forward_backward(*batch))
    assert have_same_gradients(plain, recorded)
    assert graphs_of(recorded).counts.replayed > 0


def failing(self: nn.Module, hidden: Tensor) -> Tensor:
    raise ZeroDivisionError


def test_a_step_that_fails_while_it_is_watched_is_watched_again() -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    one = case(lambda: nn.Sequential(Reading(), nn.Linear(HIDDEN, CLASSES)), draw_vectors)
    engine = recording_engine(one, plan)
    for number, batch in enumerate(woven.shares(one, engine, 5)):
        if number == 1:
            with patch.object(Reading, "forward", failing), pytest.raises(ZeroDivisionError):
                engine.forward_backward(*batch)
        else:
            engine.forward_backward(*batch)
    assert graphs_of(engine).counts.recorded == 0


def test_evaluations_and_other_orders_between_replayed_steps_change_nothing(thread_ranks: Any) -> None:
    plan = Plan(pp=2, microbatches=4, precision="fp64", cuda_graphs=True)
    both = thread_ranks.run(in_another_order, plan, ranks=2)
    assert all(same and replayed for same, replayed in both)


def in_another_order(plan: Plan) -> tuple[bool, int]:
    """Whether recorded and plain steps give the same bits under two schedules; how many were replayed."""
    plain, recorded = woven.weave(CASE, replace(plan, cuda_graphs=False)), recording_engine(CASE, plan)
    batches, same = woven.shares(CASE, plain, 8), True
    for number, batch in enumerate(batches):
        if number == 5:
            order = schedule("gpipe", ranks=2, microbatches=4)
            for engine in (plain, recorded):
                engine.follow(order)
        losses = [engine.forward_backward(*batch) for engine in (plain, recorded)]
        same &= torch.equal(*losses)
        same &= torch.equal(*(engine.evaluate(*batch) for engine in (plain, recorded)))
    return same & have_same_gradients(plain, recorded), graphs_of(recorded).counts.replayed


def test_a_loss_with_buffers_is_recorded() -> None:
    weights = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    one = case(lambda: nn.Sequential(nn.Linear(HIDDEN, CLASSES)), draw_vectors)
    one = replace(one, loss=as_loss(nn.CrossEntropyLoss(weight=weights)))
    plan = Plan(precision="fp64", cuda_graphs=True)
    plain, recorded = woven.weave(one, replace(plan, cuda_graphs=False)), recording_engine(one, plan)
    for batch in woven.shares(one, plain, 5):
        assert torch.equal(plain.forward_backward(*batch), recorded.forward_backward(*batch))
    assert have_same_gradients(plain, recorded)
    assert graphs_of(recorded).counts.replayed > 0


def test_replayed_segments_give_the_gradients_of_inputs() -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    one = case(lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)), draw_vectors)
    plain, recorded = woven.weave(one, replace(plan, cuda_graphs=False)), recording_engine(one, plan)
    for batch in woven.shares(one, plain, 5):
        for engine in (plain, recorded):
            engine.forward_backward(*batch, input_gradients=True)
        assert torch.equal(plain.input_gradients(), recorded.input_gradients())
    assert graphs_of(recorded).counts.replayed > 0
