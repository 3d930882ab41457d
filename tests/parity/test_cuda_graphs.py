"""Steps whose segments are recorded and replayed train as one rank: every gradient, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import reference, woven
from parity.case import SEED, Case, Recipe
from parity.cases import GPT2_VOCAB, USER_CASES, case, gpt2
from parity.data import draw_vectors
from parity.dropping import DROPPING, by_hand
from parity.layers import CLASSES, HIDDEN
from parity.outcome import Outcome
from parity.pairs import covering_rows
from parity.parity import compare
from parity.repeated_operations import OperationRecorder, address
from parity.rows import name_of, plan_of
from parity.woven import layer_count
from plait.engine import Engine
from plait.engine.parallelize import build_engine
from plait.engine.pipeline import stage
from plait.engine.pipeline.loss_stage import LossStage
from plait.plan.plan import Plan
from plait.schedules.search.api import schedule
from plait.tensor.layer_values import Microbatches, list_of_tensors

FIVE_STEPS = Recipe(steps=5)
"""Two eager ones, one that is recorded, and two that are replayed."""
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


def recording_engine(case: Case, plan: Plan, **options: Any) -> Engine:
    """The case's engine on this rank, which records its segments after two eager steps."""
    engine = build_engine(case.build(), plan, plait.Mesh(plan), case.loss, seed=SEED)
    engine._runner.record_segments(OperationRecorder(), **options)
    return engine


def train(case: Case, plan: Plan, recipe: Recipe) -> tuple[Outcome, Any]:
    """What the recipe gives with replayed segments, and how many there were."""
    engine = recording_engine(case, plan)
    outcome = woven.carry_out(recipe, engine, case)
    assert engine._runner.graphs is not None
    return outcome, engine._runner.graphs.counts


def check(thread_ranks: Any, case: Case, plan: Plan, recipe: Recipe = FIVE_STEPS) -> list[Any]:
    """Compare all ranks with one rank, which records nothing; return the counts of graphs of each rank."""
    dtype = woven.DTYPES[plan.precision]
    expected = reference.train(case, woven.global_rows(plan), recipe, dtype)
    results = thread_ranks.run(train, case, plan, recipe, ranks=plan.world)
    compare([outcome for outcome, _ in results], expected, dtype)
    return [counts for _, counts in results]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_replayed_segments_train_as_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    given = {name: value for name, value in row.items() if name != "tied"}
    plan = plan_of({**given, "cuda_graphs": True})
    for counts in check(thread_ranks, gpt2(layers=3, tied=row["tied"]), plan):
        assert counts.replayed >= 2 * counts.recorded > 0
        assert set(counts.eager) == {"the first steps of a shape"}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("completion", ["late", 1])
@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zb-v", "dp": 2, "strategy": "full"},
        {"pp": 4, "schedule": "zb-h1", "recompute": "full"},
        {"pp": 2, "schedule": "interleaved", "dp": 2, "strategy": "gradients", "reduce": "each"},
    ],
    ids=str,
)
def test_replayed_segments_change_no_memory_that_is_still_sent(
    thread_ranks: Any, settings: dict[str, Any], completion: Any
) -> None:
    plan = Plan(**settings, microbatches=5, precision="fp64", cuda_graphs=True)
    check(thread_ranks.under_rules(completion), gpt2(layers=3, tied=True), plan)


def graph_counts(engine: Engine) -> Any:
    """How many graphs the engine has recorded and replayed, and what ran eagerly."""
    assert engine._runner.graphs is not None
    return engine._runner.graphs.counts


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
    check(thread_ranks, case, plan)


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
        for one, other in zip(*(woven.gradients_of(engine).values() for engine in (plain, recorded))):
            assert torch.equal(one, other)
        for engine in (plain, recorded):
            for parameter in engine.parameters():
                parameter.grad = None
    assert graph_counts(recorded).replayed > 0


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
    with patch.object(type(engine._runtime.loss), "total", called), patch.object(stage, "run_backward", called):
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
    for one, other in zip(*(woven.gradients_of(engine).values() for engine in (plain, recorded))):
        assert torch.equal(one, other)
    counts = graph_counts(recorded)
    assert counts.recorded == 6  # three of each of the first two shapes
    assert counts.eager["more than 6 graphs"] == 3


class Reading(nn.Module):
    """A layer that reads a value of its input on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * (2.0 if hidden.is_meta or hidden.abs().max().item() > 0 else 1.0)


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
        (Drawing, "full", "layers '0' to '1': aten.rand would draw anew when it is recomputed"),
        (Drawing, "none", ""),
    ],
)
def test_layers_that_no_graph_can_hold_run_eagerly_by_name(make: Any, recompute: Any, why: str) -> None:
    plan = Plan(microbatches=2, precision="fp64", recompute=recompute, cuda_graphs=True)
    one = case(lambda: nn.Sequential(make(), nn.Linear(HIDDEN, CLASSES)), draw_vectors)
    engine = recording_engine(one, plan)
    for batch in woven.shares(one, engine, 4):
        engine.forward_backward(*batch)
    counts = graph_counts(engine)
    assert bool(counts.recorded) == (not why)
    assert set(counts.eager) == {"the first steps of a shape", why} - {""}


def test_a_step_that_fails_while_it_is_recorded_is_recorded_again() -> None:
    plan = Plan(microbatches=2, precision="fp64", cuda_graphs=True)
    plain, recorded = woven.weave(CASE, replace(plan, cuda_graphs=False)), recording_engine(CASE, plan)
    for number, batch in enumerate(woven.shares(CASE, plain, 5)):
        if number == 2:
            with patch.object(LossStage, "seed", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
                recorded.forward_backward(*batch)
        assert torch.equal(plain.forward_backward(*batch), recorded.forward_backward(*batch))
    for one, other in zip(*(woven.gradients_of(engine).values() for engine in (plain, recorded))):
        assert torch.equal(one, other)
    assert graph_counts(recorded).replayed > 0


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
    pairs = zip(*(woven.gradients_of(engine).values() for engine in (plain, recorded)), strict=True)
    same &= all(torch.equal(one, other) for one, other in pairs)
    return same, graph_counts(recorded).replayed


def foreign_tensors(engine: Engine) -> list[str]:
    """What graphs read or write besides memory that stays where it is: operation and shape of each tensor."""
    graphs, runtime = engine._runner.graphs, engine._runtime
    assert graphs is not None
    always = {address(runtime.pipeline.loss_stage.scale)} if runtime.pipeline.loss_stage.scale is not None else set()
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            always |= {address(one) for one in (buffer.whole, *buffer.whole_gradients)}
    always |= {address(one) for module in engine._runner.modules for one in module.buffers()}
    found = []
    for one in graphs._graphs.values():
        own = {address(tensor) for tensor in (*list_of_tensors(one.targets), one.masks._values)}
        for segment in one.segments:
            entering = (*list_of_tensors(segment.value_in), *(segment.gradients_in or ()))
            own |= {address(tensor) for tensor in entering if tensor is not None}
            own |= segment.recording.made
            for operation, tensor in segment.recording.given():
                if address(tensor) not in own | always:
                    found.append(f"{operation} {list(tensor.shape)}")
    return found


def addresses(engine: Engine) -> list[int]:
    """Where all that graphs read or write lies: in three steps it must be in the same places."""
    graphs, runtime = engine._runner.graphs, engine._runtime
    assert graphs is not None
    scale = runtime.pipeline.loss_stage.scale
    found = [] if scale is None else [address(scale)]
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            found += [address(one) for one in (buffer.whole, *buffer.whole_gradients)]
        for number in unit.stages:
            found += [one.data_ptr() for one in unit.parameters_of(number).values()]
    for one in graphs._graphs.values():
        found += [address(tensor) for tensor in (*list_of_tensors(one.targets), one.masks._values)]
        for segment in one.segments:
            found += [address(tensor) for _, tensor in segment.recording.given()]
    return found


def in_three_steps(case: Case, plan: Plan) -> tuple[list[str], list[list[int]]]:
    """What graphs read besides what stays where it is, and the addresses in the step that records and two more."""
    engine, found = recording_engine(case, plan), []
    for number, batch in enumerate(woven.shares(case, engine, 5)):
        engine.forward_backward(*batch)
        if number >= 2:
            found.append(addresses(engine))
    return foreign_tensors(engine), found


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_graphs_read_and_write_only_memory_that_stays_where_it_is(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    given = {name: value for name, value in row.items() if name != "tied"}
    plan = plan_of({**given, "cuda_graphs": True})
    for foreign, found in thread_ranks.run(in_three_steps, gpt2(layers=3, tied=row["tied"]), plan, ranks=plan.world):
        assert not foreign
        assert found[0] == found[1] == found[2]
