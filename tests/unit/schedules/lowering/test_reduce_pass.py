from __future__ import annotations

from collections import defaultdict
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import BRIEF, legal_schedules, listed, written
from sharded_cases import SCATTERED, Gradients, every_sum, shapes, units_used, words

from plait.plan.parameter_units import UnitTiming
from plait.schedules.action import Kind
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import (
    AllocateGradient,
    AwaitScatter,
    Finish,
    LayerIndex,
    LoweringSpec,
    Program,
    ReduceGradient,
    RunLayer,
    ScatterGradient,
)
from plait.schedules.named_schedules import policy_schedule
from plait.schedules.schedule import Schedule

AB = {"a": (LayerIndex(0, 0),), "b": (LayerIndex(0, 1),)}
OPTIMIZER = UnitTiming(scatters="last")
LAST = UnitTiming(scatters="last", allocates=True)
EACH = UnitTiming(scatters="each", allocates=True)


def backwards(program: Program) -> list[str]:
    """From the first backward on."""
    said = words(program)
    return said[said.index("seed 0I0") :]


def test_whole_gradients_are_scattered_when_they_are_final() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2), LoweringSpec((2,), AB, timings=dict.fromkeys(AB, OPTIMIZER))
    )
    assert backwards(program) == listed("""
        seed 0I0; 0B0.1; 0B0.0; release 0B0
        seed 0I1; 0B1.1; scatter b; 0B1.0; scatter a; collect b; reduce b; release 0B1
        collect a; reduce a; finish
    """)


def test_gradients_are_opened_before_the_first_adds_to_them() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2), LoweringSpec((2,), AB, timings=dict.fromkeys(AB, LAST))
    )
    assert backwards(program) == listed("""
        seed 0I0; open b; 0B0.1; open a; 0B0.0; release 0B0
        seed 0I1; 0B1.1; scatter b; 0B1.0; scatter a; collect b; reduce b; release 0B1
        collect a; reduce a; finish
    """)


def test_gradients_are_opened_and_scattered_for_each_microbatch() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2), LoweringSpec((2,), AB, timings=dict.fromkeys(AB, EACH))
    )
    assert backwards(program) == listed("""
        seed 0I0; open b; 0B0.1; scatter b; open a; 0B0.0; scatter a; collect b; release 0B0
        seed 0I1; open b; 0B1.1; scatter b; collect a; open a; 0B1.0; scatter a; collect b; reduce b
        release 0B1; collect a; reduce a; finish
    """)


def test_input_work_adds_what_it_need_not_leave() -> None:
    """Where each micro-batch is scattered it leaves all to the weight work, so nothing is open for it."""
    by_hand = written(["0F0 0I0 0W0"], rank_of=(0,), microbatches=1)
    (last,) = lower(by_hand, LoweringSpec((2,), AB, timings=dict.fromkeys(AB, LAST)))
    assert backwards(last) == listed("""
        seed 0I0; open b; 0I0.1; open a; 0I0.0
        0W0.1; scatter b; 0W0.0; scatter a; collect b; reduce b; release 0W0
        collect a; reduce a; finish
    """)
    (each,) = lower(by_hand, LoweringSpec((2,), AB, timings=dict.fromkeys(AB, EACH)))
    assert backwards(each) == listed("""
        seed 0I0; 0I0.1; 0I0.0
        open b; 0W0.1; scatter b; open a; 0W0.0; scatter a; collect b; reduce b; release 0W0
        collect a; reduce a; finish
    """)


def test_a_unit_that_is_on_its_way_is_awaited_before_it_is_opened_again() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2),
        LoweringSpec(
            (1,), {"a": (LayerIndex(0, 0),)}, timings=dict.fromkeys({"a": (LayerIndex(0, 0),)}, EACH)
        ),
    )
    assert backwards(program) == listed("""
        seed 0I0; open a; 0B0.0; scatter a; release 0B0
        seed 0I1; collect a; open a; 0B1.0; scatter a; release 0B1
        collect a; reduce a; finish
    """)


def test_a_unit_that_layers_share_waits_for_the_last_of_them() -> None:
    units = {"tie": (LayerIndex(0, 0), LayerIndex(0, 1)), **AB}
    (program,) = lower(
        policy_schedule("gpipe", 1, 1), LoweringSpec((2,), units, timings=dict.fromkeys(units, EACH))
    )
    assert backwards(program) == listed("""
        seed 0I0; open tie; open b; 0B0.1; scatter b
        open a; 0B0.0; scatter tie; collect b; reduce b; scatter a; collect tie; reduce tie; release 0B0
        collect a; reduce a; finish
    """)


def test_a_unit_shared_by_stages_is_reduced_at_the_end() -> None:
    units = {"tie": (LayerIndex(0, 0), LayerIndex(1, 0)), "a": (LayerIndex(0, 0),), "b": (LayerIndex(1, 0),)}
    first, last = lower(
        policy_schedule("1f1b", 2, 1), LoweringSpec((1, 1), units, timings=dict.fromkeys(units, EACH))
    )
    assert (
        words(first)[-8:]
        == listed("""
        0B0.0; scatter tie; scatter a; collect tie; release 0B0
        collect a; reduce a; reduce tie; finish
    """)[-8:]
    )
    assert (
        words(last)[-9:]
        == listed("""
        open b; 1W0.0; scatter tie; scatter b; collect tie; release 1B0
        collect b; reduce b; reduce tie; finish
    """)[-9:]
    )


def test_ranks_reduce_shared_units_in_one_order() -> None:
    units = {
        "x": (LayerIndex(0, 0), LayerIndex(2, 0)),
        "y": (LayerIndex(0, 0), LayerIndex(1, 0), LayerIndex(2, 0)),
        "own": (LayerIndex(1, 0),),
    }
    programs = lower(
        policy_schedule("1f1b", 3, 2), LoweringSpec((1, 1, 1), units, timings=dict.fromkeys(units, LAST))
    )
    assert [words(program)[-6:] for program in programs] == [
        listed("collect x; release 0B1; collect y; reduce x; reduce y; finish"),
        listed("collect y; release 1B1; collect own; reduce own; reduce y; finish"),
        listed("collect x; release 2B1; collect y; reduce x; reduce y; finish"),
    ]


def test_a_unit_used_by_two_stages_of_a_rank_is_scattered_at_the_end() -> None:
    """By themselves its micro-batches would be added up in the order in which the stages come to them."""
    rows = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
    in_a_v = written(rows, rank_of=[0, 1, 1, 0], microbatches=2)
    units = {"tied": (LayerIndex(0, 0), LayerIndex(3, 0)), "own": (LayerIndex(0, 0),)}
    program = lower(in_a_v, LoweringSpec((1, 1, 1, 1), units, timings=dict.fromkeys(units, EACH)))[0]
    assert [one.unit for one in program if isinstance(one, AllocateGradient)] == ["tied", "own", "own"]
    assert [one.unit for one in program if isinstance(one, ScatterGradient)] == ["own", "tied", "own"]


def followed(program: Program, shape: LoweringSpec) -> Gradients:
    """What has become of all gradients at the end. On the way nothing is added where it would be lost."""
    gradients = Gradients(shape)
    for instruction, units in zip(program, units_used(program, shape), strict=True):
        gradients.follow(instruction, units)
    return gradients


def sums_of(program: Program, shape: LoweringSpec) -> dict[str, list[tuple[int, int, int]]]:
    """What has to come together in each unit, in the order of the program."""
    sums = defaultdict(list)
    for unit, one in every_sum(program, shape):
        sums[unit].append(one)
    return sums


@BRIEF
@given(legal_schedules(), st.data())
def test_every_added_gradient_is_scattered_once_and_reduced_at_the_end(
    made: Schedule, data: st.DataObject
) -> None:
    shape = data.draw(shapes(made.stages, SCATTERED))
    programs = lower(made, shape)
    check_programs(programs)
    for program in programs:
        end, sums = followed(program, shape), sums_of(program, shape)
        assert not end.open
        assert not end.under_way
        assert not end.added
        assert end.collected == sums
        assert sorted(end.reduced) == sorted(sums)
        assert isinstance(program[-1], Finish)


@BRIEF
@given(legal_schedules(), st.data())
def test_a_scatter_carries_all_microbatches_or_one(made: Schedule, data: st.DataObject) -> None:
    """One, of units of one layer: of others a scatter may carry a part of the next micro-batch."""
    shape = data.draw(shapes(made.stages, SCATTERED))
    for rank, program in enumerate(lower(made, shape)):
        for unit, scatters in followed(program, shape).scatters.items():
            users = {place.stage for place in shape.units[unit] if made.rank_of[place.stage] == rank}
            each = shape.timing_of(unit).scatters == "each" and len(users) == 1
            assert len(scatters) == (made.microbatches if each else 1)
            if len(shape.units[unit]) == 1:
                assert [len(sums) for sums in scatters] == (
                    [1] * made.microbatches if each else [made.microbatches]
                )


@BRIEF
@given(legal_schedules(), st.data())
def test_one_scatter_is_under_way_while_layers_run(made: Schedule, data: st.DataObject) -> None:
    """Another begins before it is awaited, so that the line is never idle."""
    shape = data.draw(shapes(made.stages, SCATTERED))
    for program in lower(made, shape):
        under_way: list[str] = []
        for position, instruction in enumerate(program):
            match instruction:
                case ScatterGradient(unit):
                    under_way.append(unit)
                    waits = len(under_way) == 2
                    assert not waits or program[position + 1] == AwaitScatter(under_way[0])
                case AwaitScatter(unit):
                    assert unit == under_way.pop(0)
                case RunLayer():
                    assert len(under_way) <= 1


@BRIEF
@given(legal_schedules(), st.data())
def test_at_most_two_layers_have_whole_gradients(made: Schedule, data: st.DataObject) -> None:
    """Where each micro-batch is scattered: what is added to, and one on its way. Shared ones besides."""
    shape = data.draw(shapes(made.stages, st.just(EACH)))
    for program in lower(made, shape):
        gradients = Gradients(shape)
        for instruction, units in zip(program, units_used(program, shape), strict=True):
            gradients.follow(instruction, units)
            if isinstance(instruction, RunLayer) and instruction.action.kind is not Kind.F:
                assert {unit for unit in gradients.open if len(shape.units[unit]) == 1} <= {*units}
                assert len(gradients.under_way) <= 1


@BRIEF
@given(legal_schedules(), st.data())
def test_reductions_begin_as_soon_as_nothing_is_left_to_add(made: Schedule, data: st.DataObject) -> None:
    """The last scatter of a unit follows its last addition before another layer runs."""
    shape = data.draw(shapes(made.stages, SCATTERED))
    for program in lower(made, shape):
        last = {}
        for position, (instruction, units) in enumerate(
            zip(program, units_used(program, shape), strict=True)
        ):
            if isinstance(instruction, RunLayer) and instruction.action.kind in (Kind.W, Kind.B):
                last |= dict.fromkeys(units, position)
        for unit, position in last.items():
            following = program[position + 1 :]
            until = next((n for n, one in enumerate(following) if isinstance(one, RunLayer)), len(following))
            assert ScatterGradient(unit) in following[:until]
            assert AllocateGradient(unit) not in following


@BRIEF
@given(legal_schedules(), st.data())
def test_units_shared_by_ranks_are_reduced_last_and_in_one_order(made: Schedule, data: st.DataObject) -> None:
    shape = data.draw(shapes(made.stages))
    holders = {unit: {made.rank_of[place.stage] for place in places} for unit, places in shape.units.items()}
    orders = []
    for rank, program in enumerate(lower(made, shape)):
        spanning = [unit for unit, ranks in holders.items() if rank in ranks and len(ranks) > 1]
        end = program[len(program) - 1 - len(spanning) : -1]
        assert end == tuple(map(ReduceGradient, spanning))
        orders.append(spanning)
    for one, other in combinations(orders, 2):
        assert [unit for unit in one if unit in other] == [unit for unit in other if unit in one]
