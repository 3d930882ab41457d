from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import BRIEF, legal_schedules, listed, written
from sharded_cases import (
    GATHERS,
    Parameters,
    is_use,
    is_weight_work,
    shapes,
    units_used,
    without_units,
    words,
)

from plait.plan.parameter_units import UnitTiming
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import insert_gathers, lower
from plait.schedules.lowering.program import (
    ComputeLoss,
    ComputeScales,
    GatherParameters,
    LayerIndex,
    LoweringSpec,
    Program,
    ReleaseParameters,
    SeedGradient,
)
from plait.schedules.named_schedules import forward_only, policy_schedule
from plait.schedules.schedule import Schedule

AB = {"a": (LayerIndex(0, 0),), "b": (LayerIndex(0, 1),)}
EACH_USE = st.just(GATHERS)


def test_parameters_are_gathered_while_the_layer_before_runs() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2), LoweringSpec((2,), AB, timings=dict.fromkeys(AB, GATHERS))
    )
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0; release a;  await b; gather a; 0F0.1; release b; loss 0F0
        take 0F1; await a; gather b; 0F1.0; release a;  await b; 0F1.1; loss 0F1
        seed 0I0; gather a; 0B0.1; release b;  await a; gather b; 0B0.0; release a; release 0B0
        seed 0I1; await b; gather a; 0B1.1; release b; reduce b;  await a; 0B1.0; release a; reduce a
        release 0B1; finish
    """)


def test_a_step_computes_the_scales_of_matrices_in_float8_once_before_it_gathers_any() -> None:
    timings = {"a": GATHERS, "b": replace(GATHERS, scales=True)}
    for schedule, rank in ((policy_schedule("gpipe", 1, 2), 0), (policy_schedule("1f1b", 2, 2), 1)):
        layers = (2,) if schedule.stages == 1 else (1, 1)
        units = AB if schedule.stages == 1 else {"a": (LayerIndex(0, 0),), "b": (LayerIndex(1, 0),)}
        program = lower(schedule, LoweringSpec(layers, units, timings=timings))[rank]
        places = [place for place, one in enumerate(program) if isinstance(one, ComputeScales)]
        gathers = [place for place, one in enumerate(program) if isinstance(one, GatherParameters)]
        assert len(places) == 1
        assert places[0] < gathers[0]
    without = lower(policy_schedule("1f1b", 2, 2), LoweringSpec((1, 1), units, timings=timings))[0]
    assert not any(isinstance(one, ComputeScales) for one in without), "the rank has no such matrix"


def test_units_gathered_once_a_step_are_gathered_before_their_first_use() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2),
        LoweringSpec((2,), AB, timings=dict.fromkeys(AB, UnitTiming(gathers="once"))),
    )
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0;  await b; 0F0.1; loss 0F0
        take 0F1; 0F1.0; 0F1.1; loss 0F1
        seed 0I0; 0B0.1; 0B0.0; release 0B0
        seed 0I1; 0B1.1; reduce b; 0B1.0; reduce a; release 0B1; finish
    """)


def test_a_loss_that_computes_logits_uses_the_last_layers_parameters() -> None:
    """They stay until it has them, and the next ones are on their way while it computes."""
    shape = LoweringSpec(
        (2,), AB, timings=dict.fromkeys(AB, UnitTiming("each use", "last", True)), loss_computes_logits=True
    )
    (program,) = lower(policy_schedule("gpipe", 1, 1), shape)
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0; release a;  await b; 0F0.1; loss 0F0
        open b; gather a; seed 0I0; 0B0.1; release b; scatter b
        open a; await a; 0B0.0; release a; scatter a; collect b; reduce b; release 0B0
        collect a; reduce a; finish
    """)
    (program,) = lower(forward_only((0,), ranks=1, microbatches=1), shape, "output")
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0; release a;  await b; 0F0.1; keep 0F0; release b
        release 0F0; finish
    """)


def test_evaluation_gathers_and_releases_each_unit() -> None:
    forwards = forward_only((0,), ranks=1, microbatches=1)
    (program,) = lower(forwards, LoweringSpec((2,), AB, timings=dict.fromkeys(AB, GATHERS)))
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0; release a;  await b; 0F0.1; release b; loss 0F0
        release 0F0; finish
    """)


def test_weight_work_needs_no_parameters() -> None:
    by_hand = written(["0F0 0I0 0W0"], rank_of=(0,), microbatches=1)
    (program,) = lower(by_hand, LoweringSpec((2,), AB, timings=dict.fromkeys(AB, GATHERS)))
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather b; 0F0.0; release a;  await b; 0F0.1; loss 0F0
        seed 0I0; gather a; 0I0.1; release b;  await a; 0I0.0; release a
        0W0.1; reduce b; 0W0.0; reduce a; release 0W0; finish
    """)


def test_a_unit_that_the_next_layer_shares_stays() -> None:
    units = {
        "tie": (LayerIndex(0, 0), LayerIndex(0, 1), LayerIndex(0, 3)),
        "c": (LayerIndex(0, 2),),
        "d": (LayerIndex(0, 3),),
    }
    forwards = forward_only((0,), ranks=1, microbatches=1)
    (program,) = lower(forwards, LoweringSpec((4,), units, timings=dict.fromkeys(units, GATHERS)))
    assert words(program) == listed("""
        gather tie
        take 0F0; await tie; 0F0.0
        gather c; 0F0.1; release tie
        await c; gather tie; gather d; 0F0.2; release c
        await tie; await d; 0F0.3; release tie; release d; loss 0F0
        release 0F0; finish
    """)


def test_layers_without_parameters_are_no_reason_to_wait() -> None:
    units = {"a": (LayerIndex(0, 0),), "d": (LayerIndex(0, 3),)}
    forwards = forward_only((0,), ranks=1, microbatches=1)
    (program,) = lower(forwards, LoweringSpec((4,), units, timings=dict.fromkeys(units, GATHERS)))
    assert words(program) == listed("""
        gather a
        take 0F0; await a; gather d; 0F0.0; release a;  0F0.1; 0F0.2
        await d; 0F0.3; release d; loss 0F0; release 0F0; finish
    """)


def test_a_rank_gathers_before_it_waits_for_another_stage() -> None:
    """The parameters are on their way while the message is."""
    shape = LoweringSpec(
        (1, 1),
        {"a": (LayerIndex(0, 0),), "b": (LayerIndex(1, 0),)},
        timings=dict.fromkeys({"a": (LayerIndex(0, 0),), "b": (LayerIndex(1, 0),)}, GATHERS),
    )
    first, last = lower(policy_schedule("1f1b", 2, 1), shape)
    assert words(first) == listed("""
        gather a; post 0I0<1
        take 0F0; await a; 0F0.0; send 0F0>1
        await 0I0<1; 0B0.0; release a; reduce a; release 0B0; finish
    """)
    assert words(last) == listed("""
        gather b; post 1F0<0
        await 1F0<0; await b; 1F0.0; loss 1F0
        seed 1I0; 1I0.0; release b; send 1I0>0; 1W0.0; reduce b; release 1B0; finish
    """)


def test_without_units_or_instructions_inserting_gathers_changes_nothing() -> None:
    (program,) = lower(policy_schedule("gpipe", 1, 1), LoweringSpec((2,), {}))
    assert insert_gathers(program, LoweringSpec((2,), {}, timings=dict.fromkeys({}, GATHERS))) == program
    assert insert_gathers((), LoweringSpec((2,), AB, timings=dict.fromkeys(AB, GATHERS))) == ()


def followed(program: Program, shape: LoweringSpec) -> Parameters:
    """Where parameters are at the end; every use is preceded by an awaited gather that was not released."""
    parameters = Parameters()
    for instruction, units in zip(program, units_used(program, shape), strict=True):
        parameters.follow(instruction)
        if is_use(instruction):
            assert parameters.there.issuperset(units)
    return parameters


@BRIEF
@given(legal_schedules(), st.data())
def test_every_units_parameters_are_gathered_when_a_layer_uses_them(
    made: Schedule, data: st.DataObject
) -> None:
    shape = data.draw(shapes(made.stages))
    timings = {
        unit: replace(one, gathers="once") if one.gathers == "never" else one
        for unit, one in shape.timings.items()
    }
    shape = replace(shape, timings=timings)
    programs = lower(made, shape)
    check_programs(programs)
    for program in programs:
        end = followed(program, shape)
        used = {unit for units in units_used(program, shape) for unit in units}
        assert not end.under_way
        assert end.there == {unit for unit in used if shape.timing_of(unit).gathers == "once"}


@BRIEF
@given(legal_schedules(), st.data())
def test_the_last_layers_parameters_are_gathered_when_a_chunked_loss_uses_them(
    made: Schedule, data: st.DataObject
) -> None:
    """Of the last layer, without another gather."""
    shape = data.draw(shapes(made.stages, EACH_USE))
    of_loss = replace(shape, loss_computes_logits=True)
    used = of_loss.units_of_layers().get(of_loss.last_layer, ())
    for program, plain in zip(lower(made, of_loss), lower(made, shape), strict=True):
        parameters = Parameters()
        for instruction in program:
            parameters.follow(instruction)
            if isinstance(instruction, ComputeLoss | SeedGradient):
                assert parameters.there.issuperset(used)
        counts = [sum(isinstance(one, GatherParameters) for one in each) for each in (program, plain)]
        assert counts[0] == counts[1]


@BRIEF
@given(legal_schedules(), st.data())
def test_at_most_two_consecutive_layers_are_held(made: Schedule, data: st.DataObject) -> None:
    shape = data.draw(shapes(made.stages, EACH_USE))
    for program in lower(made, shape):
        in_turn = list(zip(program, units_used(program, shape), strict=True))
        uses = (set(units) for instruction, units in in_turn if is_use(instruction) and units)
        layers, parameters = [set(), *uses, set(), set()], Parameters()
        for instruction, units in in_turn:
            parameters.follow(instruction)
            before, this, after = layers[:3]
            if isinstance(instruction, ReleaseParameters):
                assert parameters.held <= before | this, "at once, before anything else is gathered"
            else:
                assert parameters.held <= this | after
            if is_use(instruction) and units:
                assert parameters.held == this | after, "the next layer's are on their way"
                del layers[0]


@BRIEF
@given(legal_schedules(), st.data())
def test_weight_work_changes_no_gather(made: Schedule, data: st.DataObject) -> None:
    shape = data.draw(shapes(made.stages, EACH_USE))

    def without_weight_work(program: Program) -> Program:
        return tuple(instruction for instruction in program if not is_weight_work(instruction))

    for program in lower(made, replace(shape, timings={})):
        gathered = insert_gathers(program, shape)
        assert without_weight_work(gathered) == insert_gathers(without_weight_work(program), shape)


@BRIEF
@given(legal_schedules(), st.data())
def test_inserting_gathers_and_reductions_keeps_the_rest_of_the_program(
    made: Schedule, data: st.DataObject
) -> None:
    shape = data.draw(shapes(made.stages))
    plain = lower(made, replace(shape, timings={}))
    assert [*map(without_units, lower(made, shape))] == [*map(without_units, plain)]
