"""The memory that recorded segments read and write: the same in each step, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest

from parity import woven
from parity.case import Case
from parity.cases import gpt2
from parity.pairs import covering_rows
from parity.recorded_steps import graphs_of, recording_engine, recordings
from parity.repeated_operations import address
from parity.rows import name_of, plan_of
from parity.test_cuda_graphs import FACTORS, allowed
from plait.engine import Engine
from plait.plan.plan import Plan
from plait.tensor.nested_values import list_of_tensors


def sent_by(case: Case, plan: Plan) -> tuple[int, int]:
    """How many tensors a replayed step sends, and how many of them from memory that graphs write."""
    engine, sent = recording_engine(case, plan), list[int]()
    exchange = engine.runtime.pipeline.exchange
    original = exchange.send

    def noted(action: Any, tensors: Any, peer: int) -> None:
        sent.extend(map(address, tensors))
        original(action, tensors, peer)

    exchange.send = noted  # type: ignore[method-assign]
    for batch in woven.shares(case, engine, 4):
        sent.clear()  # of the step before: that memory may be taken since
        engine.forward_backward(*batch)
    recorded = recordings(engine)
    assert recorded
    return len(sent), sum(one in recording.made for one in sent for recording in recorded)


def test_what_is_sent_lies_outside_the_memory_that_the_next_micro_batch_overwrites(thread_ranks: Any) -> None:
    plan = Plan(pp=2, microbatches=4, schedule="interleaved", precision="fp64", cuda_graphs=True)
    for sent, in_graphs in thread_ranks.run(sent_by, gpt2(layers=3, tied=True), plan, ranks=2):
        assert (sent > 0, in_graphs) == (True, 0)


def foreign_tensors(engine: Engine) -> list[str]:
    """What graphs read or write besides memory that stays where it is: operation and shape of each tensor."""
    graphs, runtime = graphs_of(engine), engine.runtime
    always = (
        {address(runtime.pipeline.loss_stage.scale)}
        if runtime.pipeline.loss_stage.scale is not None
        else set()
    )
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            always |= {address(one) for one in (buffer.whole, *buffer.whole_gradients)}
    always |= {address(one) for module in engine._runner.modules for one in module.buffers()}
    found = []
    for one in graphs.recorded:
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
    graphs, runtime = graphs_of(engine), engine.runtime
    scale = runtime.pipeline.loss_stage.scale
    found = [] if scale is None else [address(scale)]
    for unit in runtime.units.values():
        for buffer in unit.buffers:
            found += [address(one) for one in (buffer.whole, *buffer.whole_gradients)]
        for number in unit.stages:
            found += [one.data_ptr() for one in unit.parameters_of(number).values()]
    for one in graphs.recorded:
        found += [address(tensor) for tensor in (*list_of_tensors(one.targets), one.masks._values)]
        for segment in one.segments:
            found += [address(tensor) for _, tensor in segment.recording.given()]
    return found


def in_three_steps(case: Case, plan: Plan) -> tuple[list[str], list[list[int]]]:
    """What graphs read besides what stays, and all addresses in the step that records and two more."""
    engine, found = recording_engine(case, plan), []
    for number, batch in enumerate(woven.shares(case, engine, 5)):
        engine.forward_backward(*batch)
        if number >= 2:
            found.append(addresses(engine))
    return foreign_tensors(engine), found


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("row", covering_rows(FACTORS, allowed), ids=name_of)
def test_graphs_read_and_write_only_memory_that_stays_where_it_is(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    given = {name: value for name, value in row.items() if name != "tied"}
    plan = plan_of({**given, "cuda_graphs": True})
    for foreign, found in thread_ranks.run(
        in_three_steps, gpt2(layers=3, tied=row["tied"]), plan, ranks=plan.world
    ):
        assert not foreign
        assert found[0] == found[1] == found[2]
