from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import BRIEF, UNHURRIED, legal_schedules, listed, words, written

from plait.schedules.action import Action, Kind
from plait.schedules.check import check
from plait.schedules.lowering.check_programs import check_programs
from plait.schedules.lowering.lower import lower
from plait.schedules.lowering.program import (
    AwaitReceive,
    LayerIndex,
    LoweringSpec,
    PostReceive,
    Program,
    ReduceGradient,
    ReleaseBuffers,
    RunLayer,
    Send,
)
from plait.schedules.named_schedules import POLICIES, forward_only, policy_schedule
from plait.schedules.schedule import Schedule

TIED = LoweringSpec(
    layers=(2, 1),
    units={
        "tie": (LayerIndex(0, 0), LayerIndex(1, 0)),
        "a": (LayerIndex(0, 0),),
        "b": (LayerIndex(0, 1),),
        "c": (LayerIndex(1, 0),),
    },
)


def test_1f1b_of_two_ranks_and_two_micro_batches_is_lowered_as_written() -> None:
    first, last = lower(policy_schedule("1f1b", 2, 2), TIED)
    assert words(first) == listed("""
        post 0I0<1
        take 0F0; 0F0.0; 0F0.1; send 0F0>1
        take 0F1; 0F1.0; 0F1.1; send 0F1>1
        await 0I0<1; post 0I1<1; 0B0.1; 0B0.0; release 0B0
        await 0I1<1; 0B1.1; reduce b; 0B1.0; reduce a; release 0B1
        reduce tie; finish
    """)
    assert words(last) == listed("""
        post 1F0<0
        await 1F0<0; post 1F1<0; 1F0.0; loss 1F0
        seed 1I0; 1I0.0; send 1I0>0; 1W0.0; release 1B0
        await 1F1<0; 1F1.0; loss 1F1
        seed 1I1; 1I1.0; send 1I1>0; 1W1.0; reduce c; release 1B1
        reduce tie; finish
    """)


def test_gpipe_on_one_rank_is_lowered_as_written() -> None:
    (program,) = lower(
        policy_schedule("gpipe", 1, 2), LoweringSpec((2,), {"a": (LayerIndex(0, 0), LayerIndex(0, 1))})
    )
    assert words(program) == listed("""
        take 0F0; 0F0.0; 0F0.1; loss 0F0
        take 0F1; 0F1.0; 0F1.1; loss 0F1
        seed 0I0; 0B0.1; 0B0.0; release 0B0
        seed 0I1; 0B1.1; 0B1.0; reduce a; release 0B1
        finish
    """)


def test_with_overlap_a_full_backward_is_one_instruction_a_layer_else_two() -> None:
    by_hand = written(["0F0 0B0", "1F0 1B0"], rank_of=(0, 1), microbatches=1)
    units = {"a": (LayerIndex(1, 0),), "b": (LayerIndex(1, 1),)}
    _, last = lower(by_hand, LoweringSpec((1, 2), units, overlap=True))
    assert words(last)[-7:] == listed("1B0.1; reduce b; 1B0.0; reduce a; send 1I0>0; release 1B0; finish")
    first, _ = lower(by_hand, LoweringSpec((2, 1), {}, overlap=False))
    assert words(first)[-6:] == listed("0I0.1; 0I0.0; 0W0.1; 0W0.0; release 0B0; finish")


def test_a_full_backward_sends_before_its_weight_work() -> None:
    by_hand = written(["0F0 0B0", "1F0 1B0"], rank_of=(0, 1), microbatches=1)
    _, last = lower(by_hand, LoweringSpec((1, 2), {"a": (LayerIndex(1, 0),), "b": (LayerIndex(1, 1),)}))
    assert words(last) == listed("""
        post 1F0<0; await 1F0<0; 1F0.0; 1F0.1; loss 1F0
        seed 1I0; 1I0.1; 1I0.0; send 1I0>0; 1W0.1; reduce b; 1W0.0; reduce a; release 1B0
        finish
    """)


@pytest.mark.parametrize(("ending", "end"), [("loss", "loss 1F0"), ("output", "keep 1F0")])
def test_forward_only_programs_end_with_the_loss_or_the_kept_output(ending: str, end: str) -> None:
    first, last = lower(forward_only((0, 1), ranks=2, microbatches=1), TIED, ending)  # type: ignore[arg-type]
    assert words(first) == listed("take 0F0; 0F0.0; 0F0.1; send 0F0>1; release 0F0; finish")
    assert words(last) == listed(f"post 1F0<0; await 1F0<0; 1F0.0; {end}; release 1F0; finish")


def test_zb_h1_is_lowered_to_separate_input_and_weight_gradients() -> None:
    first, last = lower(policy_schedule("zb-h1", 2, 2), TIED)
    assert words(first) == listed("""
        post 0I0<1
        take 0F0; 0F0.0; 0F0.1; send 0F0>1
        take 0F1; 0F1.0; 0F1.1; send 0F1>1
        await 0I0<1; post 0I1<1; 0I0.1; 0I0.0
        0W0.1; 0W0.0; release 0W0
        await 0I1<1; 0I1.1; 0I1.0
        0W1.1; reduce b; 0W1.0; reduce a; release 0W1
        reduce tie; finish
    """)
    assert words(last) == listed("""
        post 1F0<0
        await 1F0<0; post 1F1<0; 1F0.0; loss 1F0
        seed 1I0; 1I0.0; send 1I0>0
        await 1F1<0; 1F1.0; loss 1F1
        seed 1I1; 1I1.0; send 1I1>0
        1W0.0; release 1W0
        1W1.0; reduce c; release 1W1
        reduce tie; finish
    """)


def test_interleaved_with_two_chunks_is_lowered_as_written() -> None:
    first, last = lower(policy_schedule("interleaved", 2, 1), LoweringSpec((1, 1, 1, 1), {}))
    assert words(first) == listed("""
        post 2F0<1; post 2I0<1
        take 0F0; 0F0.0; send 0F0>1
        await 2F0<1; 2F0.0; send 2F0>1
        await 2I0<1; post 0I0<1; 2I0.0; send 2I0>1; 2W0.0; release 2B0
        await 0I0<1; 0B0.0; release 0B0
        finish
    """)
    assert words(last) == listed("""
        post 1F0<0; post 1I0<0
        await 1F0<0; post 3F0<0; 1F0.0; send 1F0>0
        await 3F0<0; 3F0.0; loss 3F0
        seed 3I0; 3I0.0; send 3I0>0; 3W0.0; release 3B0
        await 1I0<0; 1I0.0; send 1I0>0; 1W0.0; release 1B0
        finish
    """)


def test_neighbouring_stages_of_a_v_on_one_rank_pass_tensors_without_messages() -> None:
    _, last = lower(policy_schedule("v-min", 2, 1), LoweringSpec((1, 1, 1, 1), {}))
    assert words(last) == listed("""
        post 1F0<0; post 2I0<0
        await 1F0<0; 1F0.0
        hand 2F0; 2F0.0; send 2F0>0
        await 2I0<0; 2I0.0
        hand 1I0; 1I0.0; send 1I0>0
        2W0.0; release 2W0
        1W0.0; release 1W0
        finish
    """)


def test_crossing_messages_are_posted_in_the_order_of_sending() -> None:
    # Rank 1 sends 2I1 before 0I0, and rank 0 takes 0I0 before 2I1.
    rows = ["0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"]
    first, _ = lower(written(rows, rank_of=(0, 1, 0, 1), microbatches=2), LoweringSpec((0,) * 4, {}))
    assert [word for word in words(first) if "I" in word and "send" not in word] == listed("""
        post 2I0<1
        await 2I0<1; post 2I1<1; post 0I0<1
        await 0I0<1; post 0I1<1
        await 2I1<1
        await 0I1<1
    """)


def test_a_split_backward_is_lowered_as_written() -> None:
    by_hand = written(["0F0 0I0 0W0", "1F0 1I0 1W0"], rank_of=(0, 1), microbatches=1)
    check(by_hand)
    first, last = lower(by_hand, TIED)
    assert words(first) == listed("""
        post 0I0<1; take 0F0; 0F0.0; 0F0.1; send 0F0>1
        await 0I0<1; 0I0.1; 0I0.0
        0W0.1; reduce b; 0W0.0; reduce a; release 0W0
        reduce tie; finish
    """)
    assert words(last) == listed("""
        post 1F0<0; await 1F0<0; 1F0.0; loss 1F0
        seed 1I0; 1I0.0; send 1I0>0
        1W0.0; reduce c; release 1W0
        reduce tie; finish
    """)


def test_two_stages_on_one_rank_hand_over() -> None:
    by_hand = written(["0F0 1F0 1B0 0B0"], rank_of=(0, 0), microbatches=1)
    (program,) = lower(by_hand, TIED)
    assert words(program) == listed("""
        take 0F0; 0F0.0; 0F0.1
        hand 1F0; 1F0.0; loss 1F0
        seed 1I0; 1B0.0; reduce c; release 1B0
        hand 0I0; 0B0.1; reduce b; 0B0.0; reduce tie; reduce a; release 0B0
        finish
    """)


def test_a_unit_of_two_stages_waits_for_the_later_weight_work() -> None:
    rows = ["0F0 1F0 1I0 0I0 0W0 1W0"]
    (program,) = lower(written(rows, rank_of=(0, 0), microbatches=1), TIED)
    assert words(program)[-6:] == listed("release 0W0; 1W0.0; reduce tie; reduce c; release 1W0; finish")


def test_ranks_reduce_ties_in_one_order_and_last() -> None:
    places = {
        "x": (LayerIndex(0, 0), LayerIndex(2, 0)),
        "y": (LayerIndex(0, 0), LayerIndex(1, 0), LayerIndex(2, 0)),
        "own": (LayerIndex(1, 0),),
    }
    programs = lower(policy_schedule("1f1b", 3, 2), LoweringSpec((1, 1, 1), places))
    assert [words(program)[-4:] for program in programs] == [
        ["release 0B1", "reduce x", "reduce y", "finish"],
        ["reduce own", "release 1B1", "reduce y", "finish"],
        ["release 2B1", "reduce x", "reduce y", "finish"],
    ]


@st.composite
def shapes(draw: st.DrawFn, stages: int) -> LoweringSpec:
    layers = tuple(draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    places = [LayerIndex(stage, layer) for stage, count in enumerate(layers) for layer in range(count)]
    users = st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)
    units = {str(place): (place,) for place in places}
    units |= {f"tie {number}": tuple(users) for number, users in enumerate(draw(st.lists(users, max_size=3)))}
    return LoweringSpec(layers, units, draw(st.sampled_from([None, True, False])))


@pytest.mark.parametrize("policy", POLICIES)
@BRIEF
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_every_policy_runs_with_several_layers_a_stage(
    policy: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    made = policy_schedule(policy, ranks, microbatches)
    shape = data.draw(shapes(made.stages))
    programs = lower(made, shape)
    check_programs(programs)
    every_layer_runs_once(programs, made, shape)
    units_are_reduced_once_and_final(programs, made, shape)


@UNHURRIED
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 5), st.integers(1, 6), st.data())
def test_forward_only_programs_of_every_placement_pass_the_check(
    policy: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    rank_of = policy_schedule(policy, ranks, microbatches).rank_of
    shape = data.draw(shapes(len(rank_of)))
    forwards = forward_only(rank_of, ranks=ranks, microbatches=microbatches)
    for ending in ("loss", "output"):
        check_programs(lower(forwards, shape, ending))  # type: ignore[arg-type]


@UNHURRIED
@given(legal_schedules(), st.data())
def test_programs_of_every_legal_schedule_keep_the_invariants_of_lowering(
    made: Schedule, data: st.DataObject
) -> None:
    shape = data.draw(shapes(made.stages))
    programs = lower(made, shape)
    check_programs(programs)
    every_layer_runs_once(programs, made, shape)
    messages_are_posted_in_the_order_of_sending(programs)
    units_are_reduced_once_and_final(programs, made, shape)
    for program in programs:
        release_comes_last(program)


def every_layer_runs_once(programs: tuple[Program, ...], made: Schedule, shape: LoweringSpec) -> None:
    ran = sorted(
        word.replace("B", kind)
        for program in programs
        for word in words(program)
        if "." in word
        for kind in ("IW" if "B" in word else "-")
    )
    assert ran == sorted(
        f"{stage}{kind}{microbatch}.{layer}"
        for stage, layers in enumerate(shape.layers)
        for layer in range(layers)
        for microbatch in range(made.microbatches)
        for kind in "FIW"
    )


def messages_are_posted_in_the_order_of_sending(programs: tuple[Program, ...]) -> None:
    """Each is sent, posted and awaited once, and awaited after it is posted."""
    sent, posted, awaited = defaultdict(list), defaultdict(list), defaultdict(list)
    for rank, program in enumerate(programs):
        for instruction in program:
            match instruction:
                case Send(Action(stage, kind, microbatch), peer):
                    receiver = Action(stage + (1 if kind is Kind.F else -1), kind, microbatch)
                    sent[rank, peer, kind].append(receiver)
                case PostReceive(action, peer):
                    posted[peer, rank, action.kind].append(action)
                case AwaitReceive(action, peer):
                    assert action in posted[peer, rank, action.kind]
                    awaited[peer, rank, action.kind].append(action)
    assert sent == posted
    for channel, actions in sent.items():
        assert sorted(actions) == sorted(awaited[channel])
        assert len(set(actions)) == len(actions)


def units_are_reduced_once_and_final(
    programs: tuple[Program, ...], made: Schedule, shape: LoweringSpec
) -> None:
    for rank, program in enumerate(programs):
        mine = {
            unit
            for unit, places in shape.units.items()
            if rank in {made.rank_of[place.stage] for place in places}
        }
        at = {i.unit: position for position, i in enumerate(program) if isinstance(i, ReduceGradient)}
        assert sum(isinstance(i, ReduceGradient) for i in program) == len(at)
        assert at.keys() == mine
        for position, instruction in enumerate(program):
            if isinstance(instruction, RunLayer) and instruction.action.kind in (Kind.W, Kind.B):
                place = LayerIndex(instruction.action.stage, instruction.layer)
                assert all(position < at[unit] for unit in mine if place in shape.units[unit])


def release_comes_last(program: Program) -> None:
    last = {
        (i.action.stage, i.action.microbatch): i
        for i in program
        if not isinstance(i, ReduceGradient) and hasattr(i, "action")
    }
    assert all(isinstance(instruction, ReleaseBuffers) for instruction in last.values())
    assert sum(isinstance(i, ReleaseBuffers) for i in program) == len(last)
