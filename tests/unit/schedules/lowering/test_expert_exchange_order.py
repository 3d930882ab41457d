"""Exchanges of tokens in lowered programs: where they stand, and that the ranks of a group agree on them."""

from __future__ import annotations

import pytest

import plait
from parity.cases import sparse_llama
from plait.engine.blueprint import build_blueprint
from plait.errors import ScheduleError
from plait.plan.plan import Plan
from plait.schedules.lowering.check_programs import check_programs, stream_calls
from plait.schedules.lowering.expert_exchanges import exchange_calls, exchanges_in
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import ExpertExchanges, LayerIndex, LoweringSpec, Program
from plait.schedules.lowering.stream_replay import Queued, Read
from plait.schedules.named_schedules import policy_schedule

SECOND_LAYERS = ExpertExchanges({LayerIndex(0, 1), LayerIndex(1, 1)}, {(0, 0), (1, 1)})


def programs_of(policy: str, microbatches: int = 2) -> tuple[Program, ...]:
    made = policy_schedule(policy, 2, microbatches)
    return lower(made, LoweringSpec((2,) * made.stages, {}))


def test_layers_with_experts_exchange_in_forwards_and_input_gradients() -> None:
    _, last = programs_of("zb-h1")
    assert [str(one.action) for one in exchanges_in(last, SECOND_LAYERS)] == ["1F0", "1I0", "1F1", "1I1"]
    assert {one.layer for one in exchanges_in(last, SECOND_LAYERS)} == {1}
    assert not exchanges_in(last, ExpertExchanges())


def test_each_forward_has_counts_that_the_host_reads_and_two_all_to_alls() -> None:
    _, last = programs_of("zb-h1")
    calls = [call for one in last for call in exchange_calls(1, one, SECOND_LAYERS)]
    started = [call.operation.name for call in calls if isinstance(call, Queued)]
    assert started[:5] == [
        "the all-gather of counts of 1F0.1",
        "the all-to-all to the experts of 1F0.1",
        "the all-to-all from the experts of 1F0.1",
        "the all-to-all to the experts of 1I0.1",
        "the all-to-all from the experts of 1I0.1",
    ]
    assert sum(isinstance(call, Read) for call in calls) == 2


def test_ranks_that_share_experts_and_run_layers_in_other_orders_are_refused_with_the_place() -> None:
    """Programs made by hand for two data-parallel ranks: both are legal, alone."""
    (one,), (other,) = (
        lower(policy_schedule(name, 1, 2), LoweringSpec((2,), {})) for name in ("gpipe", "1f1b")
    )
    together = ExpertExchanges({LayerIndex(0, 1)}, {(0, 1)})
    check_programs([one, one], together)
    with pytest.raises(
        ScheduleError,
        match="one order of exchanges' is broken between ranks 0 and 1, which divide experts: exchange 1 of "
        "rank 0 is that of layer 1 in 0F1, and of rank 1 that of layer 1 in 0B0",
    ):
        check_programs([one, other], together)
    check_programs([one, other], ExpertExchanges({LayerIndex(0, 1)}, {(0, 0), (1, 1)}))
    with pytest.raises(ScheduleError, match=r"exchange 1 of rank 0 is .*, and of rank 1 none"):
        check_programs([one, one[:5]], together)


def test_a_plan_divides_experts_among_ranks_of_one_index_along_pp() -> None:
    """So they run one program, and agree: ep 2 × pp 2 × shard 2, also split backwards."""
    plan = Plan(pp=2, dp=2, ep=2, strategy="full", microbatches=3, schedule="zb-h1")
    blueprint = build_blueprint(sparse_llama(layers=2).build(), plan)
    exchanges = blueprint.lowering_spec.exchanges
    assert exchanges.groups == {(0, 0), (1, 1)}
    assert len(exchanges.layers) == 2
    for steps in (blueprint.programs, blueprint.programs.posting_late()):
        for programs in (steps.train, steps.evaluate, steps.output):
            check_programs(programs, exchanges, rendezvous=steps is blueprint.programs)
            assert all(exchanges_in(one, exchanges) for one in programs)
    dense = build_blueprint(sparse_llama(layers=2).build(), Plan(pp=2, dp=2))
    assert dense.lowering_spec.exchanges == ExpertExchanges()


@pytest.mark.parametrize("policy", ["1f1b", "zb-v"])
def test_a_check_replays_the_exchanges(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each stage, as if it had a layer with experts."""
    seen: list[ExpertExchanges] = []
    original = check_programs

    def noted(programs: tuple[Program, ...], exchanges: ExpertExchanges) -> None:
        seen.append(exchanges)
        original(programs, exchanges)

    monkeypatch.setattr("plait.schedules.check.check_programs", noted)
    made = policy_schedule(policy, 2, 4)
    plait.check(made)
    (exchanges,) = seen
    rows = stream_calls(
        lower(made, LoweringSpec((1,) * made.stages, {})),
        collectives=lambda rank, one: exchange_calls(rank, one, exchanges),
    )
    reads = sum(isinstance(call, Read) for row in rows for call in row)
    assert reads == made.stages * 4
