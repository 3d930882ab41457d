"""Places sort so that a cause stands before its consequences, whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from plait.verification.step_location import Location, StepPhase

P = StepPhase


def edges(step: int, layers: int, layer: int, microbatch: int) -> Iterator[tuple[Location, Location]]:
    """What follows directly from what in a step, around one layer and one micro-batch."""

    def at(phase: StepPhase, layer: int | None = None, name: str = "") -> Location:
        return Location(step, phase, layer, microbatch, name)

    def whole(phase: StepPhase, name: str = "") -> Location:
        return Location(step, phase, name=name)

    first, last = layer == 0, layer == layers - 1
    yield whole(P.BATCH), at(P.INPUT, -1)
    yield whole(P.INITIAL, "weight"), at(P.INPUT, -1)
    yield whole(P.LOAD, "weight"), whole(P.BATCH)
    yield Location(step, P.OPTIMIZER, name="weight"), Location(step + 1, P.LOAD, name="weight")
    yield whole(P.REDUCTION, "weight"), Location(step, P.INPUT, -1, 0, evaluating=True)
    yield at(P.FORWARD, layer), Location(step, P.FORWARD, layer, microbatch, tensor=1)
    yield whole(P.INITIAL, "weight"), at(P.FORWARD, layer)
    yield (at(P.INPUT, -1) if first else at(P.MESSAGE, layer - 1)), at(P.FORWARD, layer)
    yield (at(P.INPUT, -1) if first else at(P.FORWARD, layer - 1)), at(P.FORWARD, layer)
    yield Location(step, P.PARAMETERS, layer, name="weight"), at(P.ROUTING, layer, "router")
    yield (at(P.INPUT, -1) if first else at(P.MESSAGE, layer - 1)), at(P.ROUTING, layer, "router")
    yield at(P.ROUTING, layer, "router"), at(P.FORWARD, layer)
    yield at(P.FORWARD, layer), (at(P.LOSS) if last else at(P.MESSAGE, layer))
    yield at(P.FORWARD, layer), at(P.SCALES, layer, "the input of a linear")
    yield at(P.SCALES, layer, "the input"), (at(P.LOSS) if last else at(P.MESSAGE, layer))
    yield at(P.WEIGHT_GRADIENT, layer, "weight"), at(P.GRADIENT_SCALES, layer, "the output's gradient")
    yield at(P.LOSS), at(P.LOSS_GRADIENT, layers - 1)
    yield at(P.LOSS), whole(P.MEAN_LOSS)
    given = at(P.LOSS_GRADIENT, layer) if last else at(P.GRADIENT_MESSAGE, layer)
    yield given, at(P.INPUT_GRADIENT, layer)
    yield given, at(P.RECOMPUTED_ROUTING, layer, "router")
    yield at(P.RECOMPUTED_ROUTING, layer, "router"), at(P.INPUT_GRADIENT, layer)
    yield given, at(P.WEIGHT_GRADIENT, layer, "weight")
    yield at(P.INPUT_GRADIENT, layer), at(P.WEIGHT_GRADIENT, layer, "weight")
    if not first:
        yield at(P.INPUT_GRADIENT, layer), at(P.GRADIENT_MESSAGE, layer - 1)
        yield at(P.GRADIENT_SCALES, layer, "the input"), at(P.GRADIENT_MESSAGE, layer - 1)
        yield at(P.INPUT_GRADIENT, layer), at(P.INPUT_GRADIENT, layer - 1)
    yield at(P.WEIGHT_GRADIENT, layer, "weight"), whole(P.REDUCTION, "weight")
    yield whole(P.REDUCTION, "weight"), whole(P.NORM)
    yield whole(P.NORM), whole(P.CLIP, "weight")
    yield whole(P.CLIP, "weight"), whole(P.OPTIMIZER, "weight")
    yield whole(P.OPTIMIZER, "weight"), Location(step + 1, P.BATCH)
    yield whole(P.OPTIMIZER, "weight"), Location(step + 1, P.FORWARD, 0, 0)
    yield whole(P.OPTIMIZER, "weight"), Location(step + 1, P.EVALUATION)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    layers = draw(st.integers(1, 200))
    return draw(st.integers(0, 3)), layers, draw(st.integers(0, layers - 1)), draw(st.integers(0, 5))


@given(sizes())
def test_a_cause_stands_before_its_consequences(drawn: tuple[int, int, int, int]) -> None:
    step, layers, layer, microbatch = drawn
    for cause, consequence in edges(step, layers, layer, microbatch):
        assert cause.order(layers) < consequence.order(layers), f"{cause} → {consequence}"


@given(sizes(), st.integers(0, 5))
def test_within_a_phase_micro_batches_are_ordered_by_number(
    drawn: tuple[int, int, int, int], other: int
) -> None:
    step, layers, layer, microbatch = drawn
    for phase in (P.FORWARD, P.MESSAGE, P.LOSS, P.INPUT_GRADIENT, P.WEIGHT_GRADIENT):
        one, two = (Location(step, phase, layer, number).order(layers) for number in (microbatch, other))
        assert (one < two) == (microbatch < other)


def test_the_forward_of_another_micro_batch_comes_before_a_later_layer() -> None:
    """A layer that is wrong in the last micro-batch only is named, and not what follows from it."""
    assert Location(0, P.FORWARD, 1, 7).order(3) < Location(0, P.FORWARD, 2, 0).order(3)
    assert Location(0, P.INPUT_GRADIENT, 2, 7).order(3) < Location(0, P.INPUT_GRADIENT, 1, 0).order(3)


def test_locations_in_a_step_of_two_stages_are_ordered_as_executed() -> None:
    in_order = [
        Location(0, P.BATCH),
        Location(0, P.INPUT, -1, 0),
        Location(0, P.FORWARD, 0, 0),
        Location(0, P.MESSAGE, 0, 0),
        Location(0, P.FORWARD, 1, 0),
        Location(0, P.LOSS, None, 0),
        Location(0, P.LOSS_GRADIENT, 1, 0),
        Location(0, P.INPUT_GRADIENT, 1, 0),
        Location(0, P.WEIGHT_GRADIENT, 1, 0, "1.weight"),
        Location(0, P.GRADIENT_MESSAGE, 0, 0),
        Location(0, P.INPUT_GRADIENT, 0, 0),
        Location(0, P.WEIGHT_GRADIENT, 0, 0, "0.weight"),
        Location(0, P.REDUCTION, name="0.weight"),
        Location(0, P.REDUCTION, name="1.weight"),
        Location(0, P.MEAN_LOSS),
        Location(0, P.NORM),
        Location(0, P.CLIP, name="0.weight"),
        Location(0, P.OPTIMIZER, name="0.weight"),
        Location(0, P.OPTIMIZER, name="0.weight/exp_avg"),
        Location(1, P.BATCH),
    ]
    mixed = in_order[1::2] + in_order[::2]
    assert sorted(mixed, key=lambda location: location.order(2)) == in_order
