"""What gradients should be at any time of a step, whoever adds to them, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.verification.candidate.weight_gradient_checker import (
    GradientTracker,
    ParameterUse,
    TrackedGradient,
)
from plait.verification.reference.recording import Tolerance

NAME = ("weight", 0)
LAYER = 2


def contribution(use: ParameterUse) -> Tensor:
    """Another one for each use."""
    generator = torch.Generator().manual_seed(100 * use[0] + use[1])
    return torch.randn(3, 2, dtype=torch.float64, generator=generator)


BOUND = Tolerance(2.0, 1e-14)


@dataclass
class Books:
    """A tracker of one parameter, and the gradient that it watches."""

    gradient: Tensor = field(default_factory=lambda: torch.zeros(3, 2, dtype=torch.float64))
    found: list[tuple[ParameterUse, bool]] = field(default_factory=list)
    """The uses with which something was tracked, and whether it was as it should be."""

    def __post_init__(self) -> None:
        self.tracker = GradientTracker({NAME: self.gradient}, 8 * 2.0**-52)

    def input(self, microbatch: int, adds: float = 0.0, *, layer: int = LAYER) -> None:
        """`I`, which adds a part of the contribution."""
        use = (layer, microbatch)
        self.gradient.add_(adds * contribution(use))
        self._see(use, self.tracker.after_input(NAME, use, contribution(use), BOUND, until_weight=False))

    def weight(self, microbatch: int, adds: float = 1.0, *, layer: int = LAYER) -> None:
        """`W`, which adds a part of the contribution."""
        use = (layer, microbatch)
        self.gradient.add_(adds * contribution(use))
        self._see(use, self.tracker.after_weight(NAME, use))

    def both(self, microbatch: int, adds: float = 1.0) -> None:
        """`B`, which adds a part of the contribution."""
        use = (LAYER, microbatch)
        self.gradient.add_(adds * contribution(use))
        self._see(use, self.tracker.after_input(NAME, use, contribution(use), BOUND, until_weight=True))
        self._see(use, self.tracker.after_weight(NAME, use))

    def left(self) -> list[tuple[ParameterUse, bool]]:
        return [(use, tracked.equal) for _, use, tracked in self.tracker.open_gradients([NAME])]

    def scatter(self) -> None:
        """Give what was added away, and begin with zeros again."""
        self.tracker.reset([NAME])
        self.gradient.zero_()

    def _see(self, use: ParameterUse, tracked: TrackedGradient | None) -> None:
        if tracked is not None:
            self.found.append((use, tracked.equal))
            if not tracked.equal:
                self.tracker.accept(NAME)


@pytest.fixture
def books() -> Books:
    return Books()


def right(*microbatches: int) -> list[tuple[ParameterUse, bool]]:
    return [((LAYER, number), True) for number in microbatches]


def test_a_contribution_added_by_the_full_backward_is_right(books: Books) -> None:
    for number in (0, 1, 2):
        books.both(number)
    assert books.found == right(0, 1, 2)
    assert books.left() == []


def test_a_contribution_added_by_the_input_gradient_is_right(books: Books) -> None:
    """As a norm's, whose weight gradient comes with its backward; `W` has nothing to add."""
    for number in (0, 1):
        books.input(number, 1.0)
        books.weight(number, 0.0)
    assert books.found == right(0, 1)
    assert books.left() == []


def test_a_contribution_added_by_the_weight_gradient_is_right(books: Books) -> None:
    for number in (0, 1):
        books.input(number)
        books.weight(number)
    assert books.found == right(0, 1)
    assert books.left() == []


def test_a_contribution_added_partly_by_input_and_weight_gradient_is_right(books: Books) -> None:
    for number in (0, 1):
        books.input(number, 0.25)
        books.weight(number, 0.75)
    assert books.found == right(0, 1)
    assert books.left() == []


def test_several_input_gradients_before_their_weight_gradients(books: Books) -> None:
    for number in (0, 1, 2):
        books.input(number)
    books.weight(0)
    books.input(3)
    for number in (1, 2, 3):
        books.weight(number)
    assert books.found == right(0, 1, 2, 3)
    assert books.left() == []


def test_several_backwards_begun_before_any_is_finished_are_right(books: Books) -> None:
    """Nothing is certain between; in the end all is."""
    for number in (0, 1, 2):
        books.input(number, 0.25)
    for number in (0, 1, 2):
        books.weight(number, 0.75)
    assert books.found == right(2)
    assert books.left() == []


def test_a_contribution_is_undecided_while_part_of_another_is_added(books: Books) -> None:
    books.input(0, 1.0)
    books.input(1, 0.25)
    books.weight(0, 0.0)
    assert books.found == right(0)
    books.weight(1, 0.75)
    assert books.found == right(0, 1)
    assert books.left() == []


@pytest.mark.parametrize("factor", [0.0, 2.0, 1 + 1e-9, float("nan")])
def test_a_wrong_weight_gradient_is_named_with_its_micro_batch(books: Books, factor: float) -> None:
    for number in (0, 1, 2):
        books.input(number)
    books.weight(0)
    books.weight(1, factor)
    assert books.found == [*right(0), ((LAYER, 1), False)]


def test_after_a_wrong_contribution_later_ones_are_right(books: Books) -> None:
    for number in (0, 1, 2):
        books.input(number)
    books.weight(0)
    books.weight(1, 2.0)
    books.weight(2)
    assert books.found == [*right(0), ((LAYER, 1), False), *right(2)]
    assert books.left() == []


def test_a_wrong_full_backward_is_named(books: Books) -> None:
    books.both(0)
    books.both(1, 0.5)
    books.both(2)
    assert books.found == [*right(0), ((LAYER, 1), False), *right(2)]


def test_a_wrong_input_gradient_is_seen_when_its_weight_gradient_is_done(books: Books) -> None:
    books.input(0, 2.0)
    assert books.found == []
    books.weight(0, 0.0)
    assert books.found == [((LAYER, 0), False)]


def test_a_weight_gradient_that_the_input_gradient_had_added_is_not_added_again(books: Books) -> None:
    books.input(0, 1.0)
    books.weight(0, 1.0)
    assert books.found == [*right(0), ((LAYER, 0), False)]


def test_a_contribution_that_never_was_right_remains_open(books: Books) -> None:
    books.input(0, 0.25)
    books.input(1, 0.25)
    books.weight(0, 0.75)
    books.weight(1, 0.5)
    assert books.found == []
    assert books.left() == [((LAYER, 0), False)]


def test_a_weight_gradient_that_never_comes_is_left(books: Books) -> None:
    books.input(0)
    books.input(1)
    books.weight(0)
    assert books.found == right(0)
    assert books.left() == [((LAYER, 1), False)]


def test_layers_that_share_a_parameter_are_tracked_by_use(books: Books) -> None:
    books.input(0, layer=5)
    books.input(0, layer=2)
    books.weight(0, layer=5)
    books.weight(0, layer=2)
    assert books.found == [((5, 0), True), ((2, 0), True)]


def test_a_step_begins_from_zero(books: Books) -> None:
    books.both(0)
    books.input(1)
    books.tracker.begin_step()
    books.gradient.zero_()
    books.both(0)
    assert books.found == right(0, 0)
    assert books.left() == []


def test_after_a_scatter_a_gradient_is_zero_again(books: Books) -> None:
    """As where each micro-batch is reduced by itself."""
    for number in (0, 1, 2):
        books.both(number)
        books.scatter()
    assert books.found == right(0, 1, 2)
    assert books.left() == []


def test_a_gradient_that_is_not_zero_again_is_wrong(books: Books) -> None:
    books.both(0)
    books.tracker.reset([NAME])
    books.both(1)
    assert books.found == [*right(0), ((LAYER, 1), False)]


def test_a_contribution_due_after_a_scatter_stays_open(books: Books) -> None:
    """As where a schedule runs `I` of the next micro-batch before `W` of this one."""
    books.input(0)
    books.input(1)
    books.weight(0)
    books.scatter()
    books.weight(1)
    assert books.found == right(0, 1)
    assert books.left() == []


def test_an_open_contribution_is_reported_once(books: Books) -> None:
    books.input(0, 0.25)
    assert books.left() == [((LAYER, 0), False)]
    assert books.left() == []


def test_scattering_one_gradient_leaves_the_others_tracked() -> None:
    one, other = (torch.zeros(3, 2, dtype=torch.float64) for _ in range(2))
    tracker = GradientTracker({("one", 0): one, ("other", 0): other}, 8 * 2.0**-52)
    for number in (0, 1):
        use = (LAYER, number)
        for name, gradient in tracker.gradients.items():
            gradient.add_(contribution(use))
            tracker.after_input(name, use, contribution(use), BOUND, until_weight=True)
            tracked = tracker.after_weight(name, use)
            assert tracked is not None
            assert tracked.equal
        tracker.reset([("one", 0)])
        one.zero_()


def test_only_the_asked_gradients_report_open_contributions(books: Books) -> None:
    books.input(0)
    assert list(books.tracker.open_gradients([("weight", 1)])) == []
    assert books.left() == [((LAYER, 0), False)]


def test_a_contribution_of_zero_is_right_whoever_adds_it() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    tracker = GradientTracker({NAME: zero.clone()}, 1e-15)
    assert tracker.after_input(NAME, (0, 0), zero, BOUND, until_weight=False) is None
    tracked = tracker.after_weight(NAME, (0, 0))
    assert tracked is not None
    assert tracked.equal


def test_the_tolerance_grows_with_each_added_contribution(books: Books) -> None:
    allowed = []
    for number in range(4):
        use = (LAYER, number)
        books.gradient.add_(contribution(use))
        books.tracker.after_input(NAME, use, contribution(use), BOUND, until_weight=True)
        tracked = books.tracker.after_weight(NAME, use)
        assert tracked is not None
        allowed.append(tracked.tolerance.allowed)
    assert allowed == sorted(allowed)
    assert BOUND.allowed < allowed[0] < allowed[-1] < 10 * BOUND.allowed


@st.composite
def orders(draw: st.DrawFn) -> list[tuple[str, int]]:
    """`I` and `W` of a few micro-batches in any order in which each `W` follows its `I`."""
    count = draw(st.integers(1, 5))
    drawn = draw(st.permutations([(kind, number) for kind in "IW" for number in range(count)]))
    first: dict[int, str] = {}
    order = []
    for _, number in drawn:
        order.append(("W" if number in first else "I", number))
        first[number] = "I"
    return order


@given(orders(), st.sampled_from([0.0, 0.5, 1.0]))
def test_right_contributions_are_right_in_every_order(order: list[tuple[str, int]], by_input: float) -> None:
    books = Books()
    for kind, number in order:
        act: Callable[..., None] = books.input if kind == "I" else books.weight
        act(number, by_input if kind == "I" else 1 - by_input)
    assert all(holds for _, holds in books.found)
    assert books.found
    assert books.left() == []


@given(orders(), st.sampled_from([0.0, 0.5]), st.data())
def test_a_wrong_contribution_is_found_in_every_order(
    order: list[tuple[str, int]], by_input: float, data: st.DataObject
) -> None:
    wrong = data.draw(st.integers(0, max(number for _, number in order)))
    books = Books()
    for kind, number in order:
        act: Callable[..., None] = books.input if kind == "I" else books.weight
        adds = by_input if kind == "I" else 1 - by_input
        act(number, adds + (0.125 if kind == "W" and number == wrong else 0.0))
    assert not all(holds for _, holds in [*books.found, *books.left()])
